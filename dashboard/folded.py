"""What a page shows only to those who open it: nobody's browser loads it before."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import pandas as pd
import streamlit as st

from db.numbers import MISSING

_TABLE: Final = ":material/table:"


@st.fragment
def folded(
    label: str, show: Callable[[], None], *, icon: str, key: str, is_open: bool = False
) -> None:
    """Show something once it is opened, which runs nothing else of the page again.

    `is_open`: whether it is so before anybody has opened or closed it.
    """
    fold = st.expander(label, expanded=is_open, icon=icon, key=key, on_change="rerun")
    if fold.open:
        with fold:
            show()


def folded_table(
    label: str, table: pd.DataFrame, *, key: str, titles: Mapping[str, str] | None = None
) -> None:
    """Show rows once they are opened; `titles` chooses and names their columns, None: all."""
    shown = table if titles is None else table[list(titles)]
    folded(label, partial(_rows, shown, dict(titles or {})), icon=_TABLE, key=key)


def _rows(table: pd.DataFrame, titles: dict[str, str]) -> None:
    st.dataframe(table, hide_index=True, placeholder=MISSING, column_config=titles)
