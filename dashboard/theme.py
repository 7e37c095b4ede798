"""What every face of the dashboard looks like: colours, shapes, and the server's settings.

The colours are Okabe and Ito's where those stay apart with any colour vision, the blue a shade
lighter, so that it serves a dark page as well; the tests simulate that vision. No meaning hangs on
colour alone, each also has a shape, a sign or a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

BLUE: Final = "#1A80BB"
DEEP_BLUE: Final = "#1673A8"  # carries white text at 5.2:1
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#8B45F0"
CRIMSON: Final = "#C00030"
GREY: Final = "#8A8F98"

SERIES_COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, CRIMSON, GREY)

BadgeColour = Literal["red", "orange", "yellow", "blue", "green", "violet", "gray"]


@dataclass(frozen=True, slots=True)
class PointStyle:
    """How a result of one status is drawn."""

    colour: str
    shape: str  # a symbol of Vega


STATUS_STYLES: Final[Mapping[str, PointStyle]] = {
    "ok": PointStyle(BLUE, "circle"),
    "single-sample": PointStyle(SKY, "diamond"),
    "failed": PointStyle(VERMILION, "cross"),
    "skipped": PointStyle(GREY, "triangle-down"),
    "excluded": PointStyle(PURPLE, "square"),
}

# What a change means for the reader, by the metric's direction.
CHANGE_COLOURS: Final[Mapping[str, str]] = {"worse": VERMILION, "better": GREEN}

CLAIM_BADGES: Final[Mapping[str, BadgeColour]] = {
    "supported": "green",
    "consistent": "orange",
    "untested": "gray",
}

# A level that steps up; inline, because a named icon would be fetched from another host.
PAGE_ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="none" stroke-width="2.4">'
    f'<path d="M1 12h7" stroke="{BLUE}"/><path d="M8 5h7" stroke="{VERMILION}"/>'
    f'<path d="M8 1v14" stroke="{GREY}" stroke-width="1" stroke-dasharray="2 1.5"/></svg>'
)

# The framework leaves a hand's breadth above the title, captions too pale to be read (3.9:1), white
# text on the light blue of a dark page (2.3:1), tables of text to stick out of a narrow window, the
# empty columns of a row to leave gaps below each other there, and what is chosen to be told by a
# colour that a system of few colours replaces.
PAGE_STYLE: Final = (
    ".stMainBlockContainer{padding-top:4.5rem;padding-bottom:3rem}"
    ".stMarkdown [data-testid=stCaptionContainer]{opacity:.8}"
    "[data-testid=stMarkdownContainer]:has(>table){overflow-x:auto}"
    "@media(max-width:640px){[data-testid=stMarkdownContainer]>table :is(td,th){white-space:nowrap}"
    "[data-testid=stColumn]:not(:has([data-testid=stElementContainer])){display:none}}"
    f".stMultiSelect :has(>span[title]){{background-color:{DEEP_BLUE}!important}}"
    "@media(forced-colors:active){[role=radio][aria-checked=true]"
    "{outline:3px solid Highlight;outline-offset:-3px}}"
)

# Where the pages are; the first one is the server's own address.
FIRST_PAGE: Final = "overview"
PAGES: Final = ("history", "compare", "diagnose", "machines", "alerts", "incident")

# The person of a laptop: set by `ddtree-bench dashboard --user`, which serves this machine alone.
LOCAL_USER: Final = "DDTREE_BENCH_LOCAL_USER"

# Given to `streamlit run`; the project keeps no configuration file of Streamlit.
SERVER_FLAGS: Final = (
    "--browser.gatherUsageStats=false",
    "--client.toolbarMode=minimal",
    # Both, so that the page follows the reader's light or dark setting.
    f"--theme.light.primaryColor={DEEP_BLUE}",
    f"--theme.dark.primaryColor={SKY}",
    "--theme.baseRadius=small",
    "--theme.headingFontSizes=1.9rem,1.35rem,1.1rem,1rem,0.9rem,0.8rem",
)
