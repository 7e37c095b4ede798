"""A chart put on a page.

Altair checks every chart against Vega-Lite's schema, which takes longer than drawing it. The tests
check all of them, so a page does not do it again.
"""

from typing import Final

import altair as alt
import streamlit as st

_DATA: Final = "results"


def draw(chart: alt.LayerChart, *, description: str, key: str | None = None) -> None:
    """Draw a chart whose data is one frame; what a reader cannot see is told by `description`."""
    bare = chart.copy(deep=False)
    bare.data = alt.NamedData(name=_DATA)
    spec = bare.to_dict(validate=False)
    # Altair's own look has fixed sizes; the page's look takes its place.
    spec.pop("config", None)
    # Named, because the browser finds no unnamed data beside layers with rows of their own.
    spec.setdefault("datasets", {})[_DATA] = chart.data
    st.vega_lite_chart(spec, key=key, alt=description)
