"""What the command's exit status means, and which error or verdict gives which.

The only place that knows: a command raises typed errors or names a verdict.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from dashboard.artifact import ArtifactError
from dashboard.asv_errors import AsvFailedError, AsvRunError
from dashboard.cli_notices import NoticeError
from dashboard.finding_reports import ReportError
from dashboard.forge_errors import ForgeInputError, ForgeServiceError
from dashboard.words import case_name
from db.compare import Verdict
from db.errors import DbError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from db.compare import Comparison
    from db.provenance import Refusal


class ExitCode(IntEnum):
    """The exit statuses other people's scripts rely on."""

    OK = 0
    INTERNAL = 1
    BAD_INPUT = 2
    REGRESSION = 3
    FAILED = 4  # a benchmark failed, or results are missing
    INCONCLUSIVE = 5


class RefusedError(Exception):
    """What was asked for cannot be done with what was given."""


class RefusedResultsError(Exception):
    """Results were read and refused, one line each; nothing of them was stored."""

    def __init__(self, refused: Iterable[Refusal]) -> None:
        super().__init__(
            "\n".join(
                f"refused: {case_name(one.benchmark, one.params)} of {one.commit[:12]}: "
                f"{one.reason}"
                for one in refused
            )
        )


class FailedBenchmarksError(Exception):
    """Some cases failed, one line each; the others are stored."""

    def __init__(self, failed: Iterable[str]) -> None:
        super().__init__("\n".join(f"failed: {case}" for case in failed))


class MissingResultsError(Exception):
    """The results that the answer needs are not stored."""


# The first entry that fits counts. Anything else is a bug and shows its traceback.
ERRORS: Final[tuple[tuple[type[Exception], ExitCode], ...]] = (
    (RefusedError, ExitCode.BAD_INPUT),
    (RefusedResultsError, ExitCode.BAD_INPUT),
    (FailedBenchmarksError, ExitCode.FAILED),
    (MissingResultsError, ExitCode.FAILED),
    (AsvFailedError, ExitCode.FAILED),
    (AsvRunError, ExitCode.BAD_INPUT),
    (DbError, ExitCode.BAD_INPUT),
    (ArtifactError, ExitCode.BAD_INPUT),
    (ReportError, ExitCode.BAD_INPUT),
    (NoticeError, ExitCode.INTERNAL),
    (ForgeInputError, ExitCode.BAD_INPUT),
    (ForgeServiceError, ExitCode.INTERNAL),
)

_KNOWN: Final = tuple(kind for kind, _ in ERRORS)

VERDICTS: Final = {
    Verdict.REGRESSION: ExitCode.REGRESSION,
    Verdict.FAILED: ExitCode.FAILED,
    Verdict.REMOVED: ExitCode.FAILED,
    Verdict.NEW: ExitCode.FAILED,
    Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Verdict.NOT_ENOUGH_HISTORY: ExitCode.INCONCLUSIVE,
    Verdict.SKIPPED: ExitCode.INCONCLUSIVE,
    Verdict.IMPROVEMENT: ExitCode.OK,
    Verdict.NO_CHANGE: ExitCode.OK,
}


def exit_code(comparison: Comparison) -> ExitCode:
    """Return the status a comparison ends with; without any case its results are missing."""
    return VERDICTS[comparison.verdict] if comparison.cases else ExitCode.FAILED


class Group(click.Group):
    """A group whose known errors end in one line on stderr and their exit status."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the group's own options."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _refuse_usage(error, ctx)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _refuse_usage(error, ctx)
        except _KNOWN as error:
            for line in str(error).splitlines():
                click.echo(f"{ctx.command_path}: {line}", err=True)
            ctx.exit(next(code for kind, code in ERRORS if isinstance(error, kind)))


def _refuse_usage(error: click.UsageError, ctx: click.Context) -> NoReturn:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    where = (error.ctx or ctx).command_path
    line = " ".join(error.format_message().split())
    click.echo(f"{where}: {line} (see {where} --help)", err=True)
    ctx.exit(ExitCode.BAD_INPUT)
