"""A table's first rows as text, which a browser shows before it has the code of tables.

The whole table, which can be sorted, searched and kept as a file, is loaded once it is opened.
"""

from collections.abc import Callable, Sequence
from typing import Final

import streamlit as st

from dashboard.folded import folded
from dashboard.markdown import head, row

MOST_ROWS: Final = 10


def show(
    rows: Sequence[Sequence[str]],
    titles: Sequence[str],
    *,
    right: Sequence[str],
    whole: Callable[[], None],
    key: str,
    total: int | None = None,
) -> None:
    """Show the first of the rows, and all of them to those who ask.

    Parameters
    ----------
    rows : cells that are Markdown already
    right : the titles over numbers
    whole : draws the whole table
    total : how many rows the whole table has, where not all of them are given
    """
    shown = [row(cells) for cells in rows[:MOST_ROWS]]
    st.markdown("\n".join((head(titles, right=right), *shown)))
    label = "As a table to sort, search and keep"
    total = total or len(rows)
    if total > MOST_ROWS:
        label = f"All {total:,}, as a table to sort, search and keep"
    folded(label, whole, icon=":material/table:", key=key)
