"""One thing that doctor has found, and how bad it is."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """What a finding does to results."""

    WRONG = "wrong"  # they are refused, left out of the history, or not those of the code
    NOISY = "noisy"  # they spread more, or are those of another setting
    UNKNOWN = "unknown"  # nobody can say


@dataclass(frozen=True, slots=True)
class Finding:
    """What was expected and what is, with the command that mends it or shows it whole."""

    level: Level
    subject: str
    message: str
    command: str

    @property
    def line(self) -> str:
        """The finding as one line."""
        return f"{self.level.value}: {self.subject}: {self.message} [{self.command}]"
