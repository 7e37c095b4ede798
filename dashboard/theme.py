"""What every face of the dashboard looks like: colours, shapes, and the server's flags.

The colours are Okabe and Ito's, told apart with any colour vision and on a light or a dark page;
no meaning hangs on colour alone, each also has a shape, a sign or a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8A8F98"

SERIES_COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, "#B59B00", GREY)

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
}

# What a change means for the reader, by the metric's direction.
CHANGE_COLOURS: Final[Mapping[str, str]] = {"worse": VERMILION, "better": GREEN}

CLAIM_BADGES: Final[Mapping[str, BadgeColour]] = {
    "supported": "green",
    "consistent": "orange",
    "untested": "gray",
    "refused": "red",
}

# Given to `streamlit run`; the project keeps no configuration file of Streamlit.
SERVER_FLAGS: Final = (
    "--browser.gatherUsageStats=false",
    "--client.toolbarMode=minimal",
    f"--theme.primaryColor={BLUE}",
    "--theme.baseRadius=small",
    "--theme.headingFontSizes=1.9rem,1.35rem,1.1rem,1rem,0.9rem,0.8rem",
)
