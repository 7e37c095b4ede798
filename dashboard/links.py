"""Addresses of the dashboard's pages, for those who read of a case elsewhere."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from dashboard.selection import link_query


def history_url(dashboard: str, benchmark: str, params: str, machine: str) -> str:
    """Return where a case's series is drawn; all of what names it is percent-encoded."""
    asked = link_query({"benchmark": benchmark, "params": params, "machine": machine})
    query = urlencode(asked, quote_via=quote, safe="", errors="replace")
    return f"{dashboard.rstrip('/')}/history?{query}"
