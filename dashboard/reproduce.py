"""The command that measures a point of a history again."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dashboard.selection import parse_params
from dashboard.words import case_name

LONGEST_PATTERN: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to measure one case on one commit; `command` is None where nobody can here."""

    command: str | None
    note: str


def recipe(
    *, benchmark: str, params: str, commit: str, is_external: bool, has_repository: bool
) -> Recipe:
    """Give the command for one case on one commit, and where to run it.

    Parameters
    ----------
    is_external : measured elsewhere, on code that is not in this history
    has_repository : the commit is of this project's repository
    """
    if is_external:
        return Recipe(None, "Recorded elsewhere: no commit of this repository repeats it.")
    pattern = _pattern(benchmark, params)
    if has_repository:
        return Recipe(
            f"ddtree-bench run --profile full --commits {commit}^! --bench {pattern}",
            "Run it in a checkout of this repository, on the same machine.",
        )
    return Recipe(
        f"asv run --bench {pattern} {commit}^!",
        "Run it in a checkout of the repository these results come from, on the same machine.",
    )


def bench_option(benchmark: str, params: str) -> str:
    """Give ` --bench PATTERN` for one case; nothing where its name is too long to be typed."""
    pattern = _pattern(benchmark, params)
    return f" --bench {pattern}" if len(pattern) <= LONGEST_PATTERN else ""


def cases_option(cases: Sequence[tuple[str, str]]) -> str:
    """Give ` --bench PATTERN` for several cases, benchmark and params each; nothing if too long."""
    if len(cases) == 1:
        return bench_option(*cases[0])
    names = dict.fromkeys(re.escape(benchmark) for benchmark, _ in cases)
    pattern = shlex.quote(f"^({'|'.join(names)})")
    return f" --bench {pattern}" if names and len(pattern) <= LONGEST_PATTERN else ""


def _pattern(benchmark: str, params: str) -> str:
    """Give asv's pattern for one case and no other, quoted for a shell."""
    # Escaped spaces mean the same and read worse.
    name = re.escape(_asv_name(benchmark, params)).replace("\\ ", " ")
    return shlex.quote(f"^{name}$")


def _asv_name(benchmark: str, params: str) -> str:
    """Write a case as asv does when it matches patterns: `name(value, value)`."""
    values = parse_params(params).values()
    return case_name(benchmark, ", ".join(values))
