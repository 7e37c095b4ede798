"""How old the data of a page is, in the reader's zone; it is read anew only when asked."""

import datetime as dt
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from dashboard.words import count_text

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


def line(newest: dt.datetime | None) -> None:
    """Say when the data changed last, beside the button that reads it anew."""
    with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center"):
        if newest is None:
            st.caption(":material/schedule: Nothing has been stored yet", width="content")
        else:
            age = age_text(dt.datetime.now(dt.UTC) - newest)
            st.caption(
                f":material/schedule: Data of {local_text(newest)}, {age}; it does not refresh "
                "by itself",
                width="content",
            )
        button("refresh")


def button(key: str) -> None:
    """Let a reader ask anew; a click runs the page again, which is all that it takes."""
    st.button("Refresh", icon=":material/refresh:", type="tertiary", key=key)


def local_text(at: dt.datetime) -> str:
    """Write an instant in the reader's zone, in UTC where the browser does not tell it."""
    try:
        zone: dt.tzinfo = ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        zone = dt.UTC
    return f"{at.astimezone(zone):%Y-%m-%d %H:%M %Z}"


def age_text(age: dt.timedelta) -> str:
    """Say how long ago something was, in the largest unit that fits."""
    seconds = age.total_seconds()
    for unit_s, noun in ((_DAY_S, "day"), (_HOUR_S, "hour"), (60.0, "minute")):
        if seconds >= unit_s:
            return f"{count_text(int(seconds // unit_s), noun)} ago"
    return "just now"
