"""What a page shows only to those who open it: nobody's browser loads it before."""

from collections.abc import Callable

import streamlit as st


@st.fragment
def folded(label: str, show: Callable[[], None], *, icon: str, key: str) -> None:
    """Show something once it is opened, which runs nothing else of the page again."""
    fold = st.expander(label, icon=icon, key=key, on_change="rerun")
    if fold.open:
        with fold:
            show()
