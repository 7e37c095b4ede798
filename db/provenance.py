"""Whether a result's code is its commit's: what git says against what ran.

A line that names a commit of the repository but ran another engine is foreign, and the results
it belongs to are refused, unless it says that its checkout was edited (then they are dirty) or
that it was measured elsewhere (then git has nothing to say).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from db.asv_results import BenchmarkRow, ResultFile
from db.joining import assign, span_of
from db.labels import canonical_params
from db.repository import Repository
from db.sidecar import SidecarLine


@dataclass(frozen=True, slots=True, order=True)
class Refusal:
    """A result that is not stored, and why."""

    benchmark: str
    params: str  # canonical where the benchmark is known, else as asv writes the values
    commit: str
    machine: str | None
    reason: str


class Judge:
    """Tells foreign lines from a commit's own, and refuses the results of the former."""

    def __init__(self, lines: Sequence[SidecarLine], repository: Repository | None) -> None:
        shas = {line.commit for line in lines if line.commit and not line.provenance.external}
        trees = {} if repository is None else repository.engine_trees(shas)
        self._foreign: dict[str, str] = {}
        self._by_case: dict[tuple[str, str], list[SidecarLine]] = defaultdict(list)
        self.accepted: list[SidecarLine] = []
        for line in lines:
            reason = _objection(line, trees)
            if reason is not None:
                self._foreign[line.window_id] = reason
            else:
                self.accepted.append(_cleared(line, trees))
            self._by_case[line.commit or "", line.benchmark].append(line)

    def refused_cases(self, machine: str, file: ResultFile) -> frozenset[tuple[str, str]]:
        """Give the cases of a file, by benchmark and params, that a foreign engine measured."""
        if not self._foreign:
            return frozenset()
        return frozenset(
            (row.name, params)
            for row in file.rows
            if (lines := self._by_case.get((file.commit, row.name)))
            for params in row.cases
            if self._is_foreign(row, params, [one for one in lines if one.machine == machine])
        )

    def refusals(self, names: dict[str, tuple[str, ...]]) -> tuple[Refusal, ...]:
        """List what was refused, each case once; `names` are parameters' names by benchmark."""
        lines = (line for found in self._by_case.values() for line in found)
        return tuple(
            sorted(
                {
                    Refusal(
                        line.benchmark,
                        canonical_params(names.get(line.benchmark, ()), line.params),
                        line.commit or "",
                        line.machine,
                        self._foreign[line.window_id],
                    )
                    for line in lines
                    if line.window_id in self._foreign
                },
                key=lambda refusal: (refusal.commit, refusal.benchmark, refusal.params),
            )
        )

    def _is_foreign(self, row: BenchmarkRow, params: str, lines: Iterable[SidecarLine]) -> bool:
        """Say whether any window that belongs to this result is foreign."""
        span = span_of(0, row.started_at_ms, row.duration_s)
        invocations: dict[str, list[SidecarLine]] = defaultdict(list)
        for line in lines:
            if canonical_params(row.facts.param_names, line.params) == params:
                invocations[line.invocation].append(line)
        return any(
            joined is not None and line.window_id in self._foreign
            for found in invocations.values()
            for line, joined in zip(
                found, assign([line.started_at_s for line in found], [span]), strict=True
            )
        )


def _objection(line: SidecarLine, trees: dict[str, str | None]) -> str | None:
    """Say what is wrong with the line's claim; None where nothing is known to be."""
    seen = line.provenance
    if line.commit not in trees or seen.engine_tree is None or seen.external or seen.dirty:
        return None
    expected = trees[line.commit]
    if expected == seen.engine_tree:
        return None
    own = "none" if expected is None else expected[:12]
    return (
        f"provenance: expected engine tree {own} of commit {line.commit[:12]}, "
        f"got {seen.engine_tree[:12]} (another commit's code ran; ASV_PYTHONPATH or an "
        f"environment for each worktree keeps them apart)"
    )


def _cleared(line: SidecarLine, trees: dict[str, str | None]) -> SidecarLine:
    """An engine that equals the commit's is that commit's, whatever its checkout's HEAD was."""
    seen = line.provenance
    if seen.engine_tree is None or line.commit is None:
        return line
    if trees.get(line.commit) != seen.engine_tree:
        return line
    return replace(line, provenance=replace(seen, dirty=False))
