"""The free pages of a cache: hands them out and takes them back, knows nothing of rows."""

from collections.abc import Iterable, Sequence

from engine.errors import ConfigError, OutOfPagesError


class PagePool:
    """The free pages; hands them out in `order` at first, the last given back first later."""

    def __init__(self, num_pages: int, order: Sequence[int] | None = None) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages: expected at least 1, got {num_pages} (an empty pool)")
        order = range(num_pages) if order is None else order
        if sorted(order) != list(range(num_pages)):
            raise ConfigError(
                f"page order: expected a permutation of 0..{num_pages - 1}, got {len(order)} ids "
                "(every page is handed out once)"
            )
        self.num_pages = num_pages
        self._free = list(reversed(order))

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages without an owner, the next one to be handed out first."""
        return tuple(reversed(self._free))

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, or none at all with an `OutOfPagesError`."""
        if count > len(self._free):
            raise OutOfPagesError(
                f"pages: expected {count} free, got {len(self._free)} of {self.num_pages} "
                "(release a sequence or make the pool larger)"
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Take pages back; the first of them is the next to be handed out."""
        self._free.extend(reversed(list(pages)))
