"""Alerts: what somebody must look at, what was said of it, and a place to say it."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import pandas as pd
import streamlit as st

from dashboard import signing_in, text_tables
from dashboard.data import Source
from dashboard.downloads import offer
from dashboard.evidence_view import list_claims
from dashboard.freshness import local_text
from dashboard.theme import BadgeColour
from dashboard.units import change_text, commit_text, display_unit
from dashboard.url_filters import UrlFilters, url_filters
from dashboard.words import case_name, count_text, escaped, excerpt, heads, unbroken
from db.alert_queries import AlertView, Precision
from db.alerts import BY_THE_SERVICE, LIVE
from db.columns import AlertState
from db.errors import AlertError, BusyError

NEEDING, EVERYTHING = "needing somebody", "all"
LONGEST_NOTE: Final = 10_000
LONGEST_EXCERPT: Final = 80  # characters of a note beside its alert
_SETTABLE: Final = [state.value for state in AlertState if state not in BY_THE_SERVICE]
_LIVE: Final = frozenset(state.value for state in LIVE)
_STATE_BADGES: Final[dict[str, BadgeColour]] = {
    "open": "red",
    "acknowledged": "orange",
    "confirmed": "violet",
    "expected": "blue",
    "fixed": "green",
    "false positive": "gray",
    "withdrawn": "gray",
}


def render(source: Source, history_page: st.Page) -> None:
    """Show the page; alerts link to the page of histories."""
    st.title("Alerts")
    who = signing_in.reader(source)
    signing_in.greet(who)
    found = source.alerts()
    if not found:
        st.info(
            "No alert was ever opened: `ddtree-bench detect` opens one for every slowdown that "
            "lasts.",
            icon=":material/notifications_off:",
        )
        return
    with url_filters("alerts") as filters:
        shown = _filtered(filters, found)
        _precision(source.precision())
        if shown:
            _table(shown)
        else:
            st.success("Nothing waits for anybody here.", icon=":material/done_all:")
        # Whoever reads an alert keeps it, though somebody else has just settled it.
        held = filters.held("alert")
        offered = [*shown, *(one for one in found if str(one.id) == held and one not in shown)]
        if not offered:
            return
        view = _picked(filters, offered)
        _detail(source, view, history_page)
        if who is not None and who.may_judge:
            _triage(source, view, who.email)


def _filtered(filters: UrlFilters, found: Sequence[AlertView]) -> list[AlertView]:
    left, middle, right = st.columns(3)
    with left:
        which = filters.choice("Show", "show", [NEEDING, EVERYTHING], default=NEEDING)
    if which == NEEDING:
        found = [view for view in found if view.state in _LIVE]
    with middle:
        owners = filters.many("Owners", "owner", sorted({view.owner for view in found}))
    with right:
        causes = filters.many("Causes", "cause", sorted({view.cause for view in found}))
    return [
        view
        for view in found
        if (not owners or view.owner in owners) and (not causes or view.cause in causes)
    ]


def _precision(known: Precision) -> None:
    if known.value is None:
        st.caption(f"{count_text(known.unjudged, 'alert')}, none judged yet.")
        return
    st.caption(
        f"The detector was right in {known.value:.0%} of the judged alerts, at least "
        f"{known.at_least:.0%} (95 %): {known.real} real, {known.false_positives} false, "
        f"{known.unjudged} not judged."
    )


def _table(shown: Sequence[AlertView]) -> None:
    has_notes = any(map(_last_note, shown))
    rows = [
        (
            str(view.id),
            f":{_STATE_BADGES[view.state]}-badge[{view.state}]",
            unbroken(change_text(view.relative_change)),
            escaped(view.case),
            f"`{commit_text(view.commit)}`",
            escaped(view.cause),
            escaped(view.owner),
            unbroken(local_text(view.opened_at)),
            *([escaped(excerpt(_last_note(view), LONGEST_EXCERPT))] if has_notes else []),
        )
        for view in shown
    ]
    titles = ["Alert", "State", "Change", "Case", "Since", "Cause", "Owner", "Opened"]
    titles += ["Last note"] if has_notes else []
    whole = partial(_whole, shown)
    text_tables.show(rows, titles, right=("Alert", "Change"), whole=whole, key="alerts.table")


def _whole(shown: Sequence[AlertView]) -> None:
    table = pd.DataFrame(
        [
            {
                "alert": view.id,
                "state": view.state,
                "change_pct": 100 * view.relative_change,
                "case": view.case,
                "cause": view.cause,
                "owner": view.owner,
                "commit": commit_text(view.commit),
                "opened": view.opened_at,
                "last note": _last_note(view),
            }
            for view in shown
        ]
    )
    st.dataframe(
        table,
        hide_index=True,
        column_config={
            **heads(table),
            "change_pct": st.column_config.NumberColumn("Change (%)", format="%+.1f"),
            "opened": st.column_config.DatetimeColumn(
                "Opened", timezone=st.context.timezone, format="YYYY-MM-DD HH:mm"
            ),
        },
    )
    offer("alerts", table)


def _last_note(view: AlertView) -> str:
    return next((one.note for one in view.history[::-1] if one.note), "")


def _picked(filters: UrlFilters, offered: Sequence[AlertView]) -> AlertView:
    """Ask for one alert; typing its number or a part of its case finds it."""
    labels = {
        str(view.id): f"{view.id} · {view.case} {change_text(view.relative_change)}"
        for view in offered
    }
    number = filters.one("Alert", "alert", list(labels), default=str(offered[0].id), labels=labels)
    return next(view for view in offered if str(view.id) == number)


def _detail(source: Source, view: AlertView, history_page: st.Page) -> None:
    unit = display_unit(view.unit, view.after)
    before, after = (escaped(unit.text(value)) for value in (view.before, view.after))
    with st.container(border=True):
        st.badge(view.state, color=_STATE_BADGES[view.state])
        st.markdown(
            f"**{escaped(case_name(view.benchmark, view.params))}** on {escaped(view.machine)}: "
            f"{before} → **{after}** "
            f"({change_text(view.relative_change)}) since `{commit_text(view.commit)}`, "
            f"cause {escaped(view.cause)}, owner {escaped(view.owner)}"
        )
        st.page_link(
            history_page,
            label="History of this case",
            icon=":material/timeline:",
            query_params=source.history_query(view),
        )
        claims = source.alert_claims(view)
        if claims:
            st.markdown("**What was recorded of it**")
            list_claims(claims)
    st.header("What was said")
    for step in view.history:
        by = "the service" if step.author is None else step.author
        st.markdown(f"**{step.state}** by {escaped(by)} :gray[· {local_text(step.at)}]")
        if step.note:
            # As text, whatever is in it.
            st.text(step.note)


def _state_key(view: AlertView) -> str:
    """Begin with the alert's state, and follow it for as long as nobody has chosen another.

    So whoever only writes a note takes nothing back that somebody else has said in the meantime.
    """
    key, seen = f"alerts.state.{view.id}", f"alerts.seen.{view.id}"
    now = view.state if view.state in _SETTABLE else _SETTABLE[0]
    before = st.session_state.get(seen)
    if before != now and st.session_state.get(key) in {None, before}:
        st.session_state[key] = now
    st.session_state[seen] = now
    return key


def _triage(source: Source, view: AlertView, author: str) -> None:
    """Take down what somebody says; a note that could not be stored stays in its field."""
    st.header("Say where it stands")
    key = f"alerts.note.{view.id}"
    if st.session_state.pop("alerts.stored", None) == view.id:
        # Said, not forgotten: a browser keeps the text of a field that nobody sets.
        st.session_state[key] = ""
        st.success("Taken down.", icon=":material/check:")
    with st.form(f"alerts.form.{view.id}", border=True):
        state = st.radio(
            "State",
            _SETTABLE,
            horizontal=True,
            key=_state_key(view),
            help="The state it has already adds a note and changes nothing.",
        )
        note = st.text_area("Note", key=key, max_chars=LONGEST_NOTE, placeholder="Why?")
        # Ctrl+Enter in the note sends the form; a shortcut of the button would send it once more.
        is_sent = st.form_submit_button("Take it down", icon=":material/edit_note:")
    if not is_sent:
        return
    text = note.strip()
    if state == view.state and not text:
        st.info(f"It is {view.state} already: write a note, or choose another state.")
        return
    try:
        if not _is_last(view, author, state, text):
            source.triage(view.id, AlertState(str(state)), author=author, note=text or None)
    except (AlertError, BusyError) as error:
        st.error(f"Not stored: {escaped(str(error))}. The note is kept above.")
        return
    st.session_state["alerts.stored"] = view.id
    st.rerun()


def _is_last(view: AlertView, author: str, state: str, note: str) -> bool:
    """Whether it was taken down last: a second click leaves before the first one's answer comes."""
    last = view.history[-1]
    return (last.author, last.state, last.note) == (author, state, note)
