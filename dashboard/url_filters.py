"""Widgets whose values live in the page's URL, so that a link shows what its sender saw.

The URL is not trusted: a value the page does not offer is left out and told to the reader.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import streamlit as st

from dashboard.words import count_text, escaped

_MOST_TOLD: Final = 3  # of what a link asks in vain, word by word


@contextmanager
def url_filters(page: str, start: Mapping[str, str] | None = None) -> Iterator["UrlFilters"]:
    """Give a page its filters, and write them into the URL when the page is drawn.

    A URL that says nothing is read as one that says `start`.
    """
    # Reserved now, at the top of the page, for what is only known after the last widget.
    messages = st.container()
    filters = UrlFilters(page, start or {})
    yield filters
    with messages:
        filters.write_back()


class UrlFilters:
    """The filters of one page in one run of it."""

    def __init__(self, page: str, start: Mapping[str, str]) -> None:
        self._page = page
        self._asked = {name: st.query_params.get_all(name) for name in st.query_params}
        self._shown: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self._unknown: list[str] = []
        self._url, self._seen, left = st.session_state.get(self._written_key, (None, None, {}))
        # A link or the back button brought another URL than the widgets wrote: it wins. Not so if a
        # widget was used: the browser had not yet heard of the URL that the use before it wrote.
        self._is_fresh = self._asked != self._url and not self._is_used(left)
        # What a first link would ask for; the URL itself keeps what it says until it is written.
        self._wanted = self._asked or {name: [value] for name, value in start.items()}
        if self._is_fresh:
            self._forget_widgets()

    def held(self, name: str) -> str | None:
        """Give the one value that the URL or the reader named last, offered or not."""
        kept = st.session_state.get(self._key(name))
        return next(iter(self._wanted.get(name, [])), None) if kept is None else str(kept)

    def many(
        self, label: str, name: str, options: Sequence[str], *, default: Sequence[str] = ()
    ) -> list[str]:
        """Ask for any number of the options; none means all of them."""
        key = self._seed(name, options, default)
        chosen = st.multiselect(label, options, key=key, placeholder="all")
        self._shown[name] = [str(value) for value in chosen]
        return self._shown[name]

    def one(
        self,
        label: str,
        name: str,
        options: Sequence[str],
        *,
        default: str,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Ask for exactly one of a long list of options, shown by their labels."""
        key = self._seed_one(name, options, default)
        shown = (labels or {}).get
        chosen = st.selectbox(
            label, options, key=key, format_func=lambda option: shown(option, option)
        )
        return self._keep_one(name, chosen, default)

    def choice(self, label: str, name: str, options: Sequence[str], *, default: str) -> str:
        """Ask for exactly one of a few options that are all seen at once."""
        key = self._seed_one(name, options, default)
        chosen = st.segmented_control(label, options, key=key, required=True)
        return self._keep_one(name, chosen, default)

    def write_back(self) -> None:
        """Put what the widgets show into the URL and tell what the URL asked in vain."""
        unknown = set(self._asked) - self._known if self._is_fresh else set()
        self._unknown += [f"{name} is no filter of this page" for name in sorted(unknown)]
        for message in self._unknown[:_MOST_TOLD]:
            st.warning(f"From the link: {escaped(message)}.", icon=":material/link_off:")
        if (more := len(self._unknown) - _MOST_TOLD) > 0:
            st.warning(
                f"From the link: {count_text(more, 'more value')} that this page does not know.",
                icon=":material/link_off:",
            )
        shown = {name: values for name, values in self._shown.items() if values}
        url = self._asked
        # A link that says a default stays as it is: written anew, it would be an entry of the
        # browser's history that its back button could not leave.
        says_it = all(url.get(name) == values for name, values in shown.items())
        is_as_it_was = says_it if self._is_fresh else shown == self._seen
        if self._unknown or not is_as_it_was:
            url = shown
        if url != self._asked:
            st.query_params.from_dict(url)
        st.session_state[self._written_key] = url, shown, self._widgets()

    @property
    def _written_key(self) -> str:
        return f"{self._page}.url"

    def _key(self, name: str) -> str:
        return f"{self._page}.filter.{name}"

    def _widgets(self) -> dict[str, object]:
        """Give what each widget holds, by its key."""
        keys = [str(key) for key in st.session_state]
        return {key: st.session_state[key] for key in keys if key.startswith(self._key(""))}

    def _is_used(self, left: Mapping[str, object]) -> bool:
        """Whether a reader changed a widget since the run before left it."""
        return any(value != left.get(key, value) for key, value in self._widgets().items())

    def _forget_widgets(self) -> None:
        for key in self._widgets():
            del st.session_state[key]

    def _seed(self, name: str, options: Sequence[str], default: Sequence[str]) -> str:
        """Give a widget its state before it is made: what it had, what the URL asks, the default.

        What other filters have since made impossible is left out.
        """
        self._known.add(name)
        key = self._key(name)
        kept = st.session_state.get(key)
        if kept is None:
            kept = self._offered(name, options)
        values = [kept] if isinstance(kept, str) else kept
        st.session_state[key] = [value for value in values if value in options] or list(default)
        return key

    def _seed_one(self, name: str, options: Sequence[str], default: str) -> str:
        key = self._seed(name, options, [default])
        st.session_state[key] = st.session_state[key][0]
        return key

    def _offered(self, name: str, options: Sequence[str]) -> list[str]:
        asked = self._wanted.get(name, [])
        self._unknown += [
            f"there is no {name} “{value}” here" for value in asked if value not in options
        ]
        return [value for value in asked if value in options]

    def _keep_one(self, name: str, chosen: str | None, default: str) -> str:
        value = default if chosen is None else str(chosen)
        self._shown[name] = [] if value == default else [value]
        return value
