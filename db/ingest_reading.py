"""Everything an ingestion reads before it writes: files, sidecars and recorded orders."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from db.asv_results import ResultFile, read_result_file
from db.asv_tree import MACHINE, ORDER, MachineFolder, Sources, Tree
from db.benchmark_facts import BenchmarkFacts, read_benchmarks
from db.foreign import Given, read_foreign
from db.ingest_settings import Settings
from db.json_files import load_json, optional_text
from db.provenance import Judge
from db.repository import Repository, read_recorded_order
from db.result_store import MachineFile
from db.sidecar import SidecarLine, read_sidecar

MACHINE_FACTS = ("arch", "cpu", "num_cpu", "os", "ram")
CELLS_AHEAD = 200_000  # read before anything is locked; a larger call reads on while it writes


class Reader:
    """Reads what one call names; under the names that the settings give it now."""

    def __init__(
        self, found: Sources, history: Repository | None, settings: Settings, given: Given
    ) -> None:
        self._found = found
        self._settings = settings
        self._given = given
        self._unexplained: dict[str, None] = {}
        self.history = history
        lines = [line for tree in found.trees for line in self._lines(tree)]
        self.judge = Judge(lines, history)
        self.recorded = [
            info
            for tree in found.trees
            if (path := tree.root / ORDER).is_file()
            for info in read_recorded_order(path)
        ]

    @property
    def unexplained(self) -> tuple[str, ...]:
        """The metrics so far of which nobody said which way is better."""
        return tuple(self._unexplained)

    def files(self) -> Iterator[MachineFile]:
        """Give every file's results, the first `CELLS_AHEAD` of them read already."""
        rest = self._files()
        ahead: list[MachineFile] = []
        cells = 0
        for entry in rest:
            ahead.append(entry)
            cells += sum(len(row.cells) for row in entry.file.rows)
            if cells >= CELLS_AHEAD:
                break
        return chain(ahead, rest)

    def _lines(self, tree: Tree) -> Iterator[SidecarLine]:
        sole = tree.sole_machine
        machine = None if sole is None else self._machine_row(sole)["name"]
        for path in tree.sidecars:
            for line in read_sidecar(path, machine):
                yield self._renamed_line(line)

    def _files(self) -> Iterator[MachineFile]:
        for tree in self._found.trees:
            if tree.machines:
                yield from self._files_of(tree)
        for path in self._found.files:
            foreign = read_foreign(path, self._given, self._settings, self.history)
            self._unexplained |= dict.fromkeys(foreign.unexplained)
            machine = dict(foreign.machine)
            machine["name"] = self._settings.machine(str(machine["name"]))
            yield MachineFile(machine, self._renamed_file(foreign.file))

    def _files_of(self, tree: Tree) -> Iterator[MachineFile]:
        benchmarks = {
            name: self._facts_now(name, facts)
            for name, facts in read_benchmarks(tree.root / "benchmarks.json").items()
        }
        for folder in tree.machines:
            machine = self._machine_row(folder)
            for path in folder.files:
                file = self._renamed_file(read_result_file(path, benchmarks))
                refused = self.judge.refused_cases(str(machine["name"]), file)
                yield MachineFile(machine, file, refused)

    def _machine_row(self, folder: MachineFolder) -> dict[str, str | None]:
        """Read machine.json; what it does not say of itself its folder's name does."""
        path = folder.path / MACHINE
        found, _ = load_json(path)
        facts = {
            key: None if found.get(key) is None else str(found[key])[:200] for key in MACHINE_FACTS
        }
        name = optional_text(found, "machine", 200, str(path)) or folder.path.name
        return {"name": self._settings.machine(name), **facts}

    def _facts_now(self, name: str, facts: BenchmarkFacts) -> BenchmarkFacts:
        """Give a benchmark's facts as they are configured, its parameters as they are called."""
        renamed = self._settings.renaming(name, None)
        if renamed is not None and renamed.params:
            facts = replace(facts, param_names=renamed.param_names(facts.param_names))
        return self._settings.facts(name, facts)

    def _renamed_file(self, file: ResultFile) -> ResultFile:
        if not self._settings.renamed:
            return file
        rows = []
        for row in file.rows:
            renamed = self._settings.renaming(row.name, row.version)
            if renamed is None:
                rows.append(row)
            else:
                version = renamed.to_version or row.version
                rows.append(replace(row, name=renamed.to, version=version))
        return replace(file, rows=tuple(rows))

    def _renamed_line(self, line: SidecarLine) -> SidecarLine:
        machine = None if line.machine is None else self._settings.machine(line.machine)
        renamed = self._settings.renaming(line.benchmark, line.version)
        if renamed is None:
            return line if machine == line.machine else replace(line, machine=machine)
        version = renamed.to_version or line.version
        return replace(line, machine=machine, benchmark=renamed.to, version=version)
