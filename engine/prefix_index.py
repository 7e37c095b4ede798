"""Which pages hold the rows of which tokens, so that a prompt can start from an earlier one's.

A row depends on its own token and all tokens before it. An entry is therefore a whole page's
tokens behind the entry of the page before: a tree of pages, matched token by token from its root,
so that two different beginnings can never be taken for each other.

::

    tokens  a b c d | e f g h      page 4
                    | e f x y      page 7      page size 4; both behind page 2, which holds a b c d

Entries stand in the order of their last use, and every use of an entry uses its ancestors after
it. So a page stands behind all pages that continue it, and eviction takes leaves first. Knows
neither rows nor sequences.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.errors import CacheError

_ROOT = 0  # what the first page of a sequence is indexed behind


@dataclass(slots=True, eq=False)
class _Entry:
    """One indexed page."""

    number: int  # never given twice, so what an evicted page was continued by stays lost
    key: tuple[int, tuple[int, ...]]  # number of the page before, tokens of this one
    page: int
    before: "_Entry | None"
    depth: int  # pages before it
    num_children: int = 0


class PrefixIndex:
    """Pages of `page_size` rows by the tokens they and their predecessors hold."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._entries: OrderedDict[tuple[int, tuple[int, ...]], _Entry] = OrderedDict()
        self._last_number = _ROOT

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pages(self) -> tuple[int, ...]:
        """The indexed pages, the least recently used first."""
        return tuple(entry.page for entry in self._entries.values())

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Return the longest run of pages that hold the beginning of `token_ids`, in order."""
        found: list[_Entry] = []
        for tokens in self._whole_pages(token_ids):
            entry = self._entries.get((found[-1].number if found else _ROOT, tokens))
            if entry is None:
                break
            found.append(entry)
        self._use(found)
        return [entry.page for entry in found]

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Index `pages` under the whole pages of `token_ids`; return those that were new to it.

        Where other pages already hold the same tokens, these stay and the given ones are left out.
        """
        chain: list[_Entry] = []
        added = []
        for tokens, page in zip(self._whole_pages(token_ids), pages, strict=False):
            before = chain[-1] if chain else None
            key = (before.number if before else _ROOT, tokens)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._add(key, page, before)
                added.append(page)
            chain.append(entry)
        self._use(chain)
        return added

    def evict(self, count: int, is_idle: Callable[[int], bool]) -> list[int]:
        """Forget the `count` least recently used pages that are idle and return them.

        A page is passed over as long as one that continues it stays. If fewer than `count` can
        go, none goes and the list is empty.
        """
        victims: list[_Entry] = []
        passed: list[_Entry] = []
        leaving: Counter[int] = Counter()  # by number: continuations among the victims
        for entry in self._entries.values():
            if len(victims) == count:
                break
            if is_idle(entry.page) and entry.num_children == leaving[entry.number]:
                victims.append(entry)
                leaving[entry.key[0]] += 1
            else:
                passed.append(entry)
        self._use(_with_ancestors(passed))  # so that the next eviction need not pass them again
        if len(victims) < count:
            return []
        for entry in victims:
            self._remove(entry)
        return [entry.page for entry in victims]

    def clear(self) -> list[int]:
        """Forget everything and return the pages that were indexed."""
        pages = list(self.pages)
        self._entries.clear()
        return pages

    def check(self) -> None:
        """Refuse an index that has lost a page's predecessor, its count or its order."""
        seen: Counter[int] = Counter()  # by number: continuations met so far
        for key, entry in self._entries.items():
            before = entry.before
            is_behind_a_page = before is None or self._entries.get(before.key) is before
            if entry.key != key or not is_behind_a_page:
                raise CacheError(
                    f"index of page {entry.page}: expected the page before it to be indexed, got "
                    f"{key} (what cannot be matched can never be reused)"
                )
            if entry.num_children != seen[entry.number]:
                raise CacheError(
                    f"index of page {entry.page}: expected {seen[entry.number]} pages that "
                    f"continue it, all used before it, got {entry.num_children} (eviction takes "
                    "leaves first)"
                )
            seen[key[0]] += 1

    def _whole_pages(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.page_size
        for start in range(0, len(token_ids) - size + 1, size):
            yield tuple(token_ids[start : start + size])

    def _use(self, entries: Sequence[_Entry]) -> None:
        """Put entries last, each behind those that continue it; ancestors come first."""
        for entry in reversed(entries):
            self._entries.move_to_end(entry.key)

    def _add(self, key: tuple[int, tuple[int, ...]], page: int, before: _Entry | None) -> _Entry:
        self._last_number += 1
        entry = self._entries[key] = _Entry(
            self._last_number, key, page, before, depth=before.depth + 1 if before else 0
        )
        if before is not None:
            before.num_children += 1
        return entry

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        if entry.before is not None:
            entry.before.num_children -= 1


def _with_ancestors(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return entries and all they continue, once each, ancestors first."""
    found: dict[int, _Entry] = {}
    for entry in entries:
        link: _Entry | None = entry
        while link is not None and link.number not in found:
            found[link.number] = link
            link = link.before
    return sorted(found.values(), key=lambda entry: entry.depth)
