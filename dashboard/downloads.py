"""Tables and charts as files: CSV, SVG and PNG, made when somebody asks for them."""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pandas as pd
import streamlit as st
import vl_convert

_PIXELS_PER_POINT: Final = 2.0
_LONGEST_STEM: Final = 120
# Spreadsheets take text that begins so for a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def offer(name: str, table: pd.DataFrame, spec: Callable[[], dict[str, Any]] | None = None) -> None:
    """Offer a table, and the chart that `spec` gives, under a name of its own on the page."""
    stem = file_stem(name)
    with st.popover("Download", icon=":material/download:", type="tertiary"):
        files: list[tuple[str, str, Callable[[], bytes]]] = [
            ("csv", "text/csv", partial(csv_of, table))
        ]
        if spec is not None:
            files += [
                ("svg", "image/svg+xml", partial(_svg_of, spec)),
                ("png", "image/png", partial(_png_of, spec)),
            ]
        for kind, mime, make in files:
            st.download_button(
                kind.upper(),
                make,
                file_name=f"{stem}.{kind}",
                mime=mime,
                on_click="ignore",
                key=f"download.{name}.{kind}",
            )


def file_stem(name: str) -> str:
    """Give a file name of the safe characters of any text; long texts keep theirs apart."""
    stem = re.sub(r"[^A-Za-z0-9._=-]+", "-", name).strip("-.")
    if len(stem) > _LONGEST_STEM:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{stem[: _LONGEST_STEM - 9]}-{digest}"
    return stem or "chart"


def csv_of(table: pd.DataFrame) -> bytes:
    """Write a table as CSV in which no text is a formula."""
    safe = table.copy()
    for column in safe.select_dtypes(include=["object", "string"]):
        safe[column] = [
            f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
            for value in safe[column]
        ]
    return safe.to_csv(index=False).encode()


def _svg_of(spec: Callable[[], dict[str, Any]]) -> bytes:
    return vl_convert.vegalite_to_svg(spec()).encode()


def _png_of(spec: Callable[[], dict[str, Any]]) -> bytes:
    return vl_convert.vegalite_to_png(spec(), scale=_PIXELS_PER_POINT)
