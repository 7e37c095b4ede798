"""Whether a result's code is its commit's: what git says against what ran.

A line that names a commit of the repository but ran another engine is foreign, and the results
it belongs to are refused, unless it says that its checkout was edited (then they are dirty) or
that it was measured elsewhere (then git has nothing to say). A line that was told no commit is held
to that of the result it measured; a result whose samples are those of a line that was told another
commit, and of none of its own, is refused as well.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from db.asv_results import BenchmarkRow, ResultFile
from db.joining import assign, contains, span_of
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
        self._repository = repository
        self._untold: set[Refusal] = set()
        self._foreign: dict[str, str] = {}
        self._by_case: dict[tuple[str, str], list[SidecarLine]] = defaultdict(list)
        self._told: dict[str, dict[float, list[SidecarLine]]] = {}
        self.accepted: list[SidecarLine] = []
        for line in lines:
            if line.commit and line.samples_s:
                firsts = self._told.setdefault(line.benchmark, defaultdict(list))
                firsts[_rounded(line.samples_s[0])].append(line)
            reason = _objection(line, trees)
            if reason is not None:
                self._foreign[line.window_id] = reason
            else:
                self.accepted.append(_cleared(line, trees))
            self._by_case[line.commit or "", line.benchmark].append(line)

    def refused_cases(self, machine: str, file: ResultFile) -> frozenset[tuple[str, str]]:
        """Give the cases of a file, by benchmark and params, that a foreign engine measured."""
        suspect = self._untold_cases(machine, file) | self._cases_of_other_commits(machine, file)
        if not self._foreign:
            return suspect
        return suspect | frozenset(
            (row.name, params)
            for row in file.rows
            if (lines := self._by_case.get((file.commit, row.name)))
            for params in row.cases
            for line in _windows(row, params, [one for one in lines if one.machine == machine])
            if line.window_id in self._foreign
        )

    def _untold_cases(self, machine: str, file: ResultFile) -> frozenset[tuple[str, str]]:
        """Give those a foreign engine measured in runs that were told no commit."""
        rows = [row for row in file.rows if ("", row.name) in self._by_case]
        if not rows or self._repository is None:
            return frozenset()
        trees = self._repository.engine_trees([file.commit])
        found, foreign = set[Refusal](), set[str]()
        for row in rows:
            for params, samples in zip(row.cases, row.cells.samples, strict=True):
                lines = [
                    line
                    for line in self._by_case["", row.name]
                    if _measured(line, machine, samples)
                ]
                for line in _windows(row, params, lines):
                    reason = _objection(_claimed(line, file.commit, samples), trees)
                    if reason is not None:
                        found.add(Refusal(row.name, params, file.commit, machine, reason))
                        foreign.add(line.window_id)
        self._untold |= found
        self.accepted = [line for line in self.accepted if line.window_id not in foreign]
        return frozenset((refusal.benchmark, refusal.params) for refusal in found)

    def _cases_of_other_commits(self, machine: str, file: ResultFile) -> frozenset[tuple[str, str]]:
        """Give those whose samples were taken for another commit and for none of this one's."""
        found = set[Refusal]()
        for row in (row for row in file.rows if row.name in self._told):
            firsts = self._told[row.name]
            for params, samples in zip(row.cases, row.cells.samples, strict=True):
                commits = {
                    line.commit
                    for sample in samples
                    for line in firsts.get(_rounded(sample), ())
                    if canonical_params(row.facts.param_names, line.params) == params
                    and contains(samples, line.samples_s)
                }
                if commits and file.commit not in commits:
                    other = " and ".join(sorted(str(commit)[:12] for commit in commits))
                    reason = (
                        f"provenance: expected samples of commit {file.commit[:12]}, got those a "
                        f"sidecar holds for {other} (a result file under another name?)"
                    )
                    found.add(Refusal(row.name, params, file.commit, machine, reason))
        self._untold |= found
        return frozenset((refusal.benchmark, refusal.params) for refusal in found)

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
                }
                | self._untold,
                key=lambda refusal: (refusal.commit, refusal.benchmark, refusal.params),
            )
        )


def _windows(row: BenchmarkRow, params: str, lines: Iterable[SidecarLine]) -> list[SidecarLine]:
    """Give those of the lines that belong to this result, by case and time."""
    span = span_of(0, row.started_at_ms, row.duration_s)
    invocations: dict[str, list[SidecarLine]] = defaultdict(list)
    for line in lines:
        if canonical_params(row.facts.param_names, line.params) == params:
            invocations[line.invocation].append(line)
    return [
        line
        for found in invocations.values()
        for line, joined in zip(
            found, assign([line.started_at_s for line in found], [span]), strict=True
        )
        if joined is not None
    ]


def _rounded(sample: float) -> float:
    """Give a sample as a key; sidecar and result file agree to more digits than these."""
    return float(f"{sample:.9g}")


def _measured(line: SidecarLine, machine: str, samples: Sequence[float]) -> bool:
    """Say whether the samples are the line's; where none were recorded, its machine has to do."""
    if not samples:
        return line.machine == machine
    return line.machine in {None, machine} and contains(samples, line.samples_s)


def _claimed(line: SidecarLine, commit: str, samples: Sequence[float]) -> SidecarLine:
    """Hold a line to a result's commit; only by its samples could it mark the result as dirty."""
    seen = line.provenance
    dirty = seen.dirty if samples else False
    return replace(line, commit=commit, provenance=replace(seen, dirty=dirty))


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
