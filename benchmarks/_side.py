"""One side of a comparison in turns: a process that opens cases and takes samples when it is told.

A script, and not asv's. Who compares two commits starts one for each, both at once, with the
commit's engine first on `PYTHONPATH`, and has them take turns. The suites are always those of the
folder this script is in. Questions and answers are JSON objects, a line each, over standard input
and what was standard output; what a suite prints goes to standard error::

    {"do": "list"}                                       → {"cases": {benchmark: {…}}}
    {"do": "open", "benchmark": "tree.Accept.time_accept", "params": ["64"]} → {} or {"absent": why}
    {"do": "take", "seconds": 0.05, "least": 1}          → {"samples_s": [0.0012, …]}
    {"do": "close"}                                      → {}

A case is built, warmed up and watched by its suite as under asv, and its sidecar line is written
when it is closed. Any other error ends the process with its traceback; so does the end of input.
"""

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

SERVES_VARIABLE: Final = "DDTREE_BENCH_SERVES"  # as `_case_end` has it, which is not imported yet
FOLDER: Final = Path(__file__).resolve().parent
STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Case:
    """A case that is built."""

    suite: Any
    arguments: tuple[Any, ...]
    body: Callable[..., object]
    known_s: list[float] = field(default_factory=list)  # samples of a suite that measured already

    def sample(self) -> float:
        """Put everything back and time the body once."""
        self.suite.setup(*self.arguments)
        began_s = self.suite.timer()
        self.body(*self.arguments)
        seconds: float = self.suite.timer() - began_s
        return seconds


@dataclass(slots=True)
class Server:
    """The case that is open, and how each question is answered."""

    _case: Case | None = None
    _caches: dict[object, Any] = field(default_factory=dict)  # of suites that measure all at once

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        told = dict(question)
        found: dict[str, Any] = getattr(self, f"do_{told.pop('do')}")(**told)
        return found

    def do_list(self) -> dict[str, Any]:
        """Name all benchmarks: the axes of each as asv writes them, and its patience in seconds."""
        return {
            "cases": {
                name: {
                    "params": [[repr(one) for one in axis] for axis in axes_of(suite)],
                    "timeout": suite.timeout,
                }
                for path in sorted(FOLDER.glob("[!_]*.py"))
                for name, suite in suites_of(f"{FOLDER.name}.{path.stem}").items()
            }
        }

    def do_open(self, benchmark: str, params: list[str]) -> dict[str, Any]:
        """Build a case and warm it up; say why there is none."""
        module = ".".join([FOLDER.name, *benchmark.split(".")[:-2]])
        try:
            self._case = self._built(suites_of(module)[benchmark], benchmark, params)
        except NotImplementedError as reason:  # asv's word for a case that this machine lacks
            return {"absent": str(reason)}
        except ImportError as error:  # the engine is another commit's than the suites
            if not (error.name or "").startswith("engine"):
                raise
            return {"absent": str(error)}
        gc.collect()
        gc.freeze()  # so that a collection before each turn takes no time
        return {}

    def do_take(self, seconds: float, least: int) -> dict[str, Any]:
        """Take samples for that long, and at least so many; the collector waits meanwhile."""
        if self._case is None:
            raise LookupError("take: expected a case that is open, got none")
        if self._case.known_s:
            return {"samples_s": self._case.known_s}
        samples_s: list[float] = []
        with _no_collection():
            end_s = time.perf_counter() + seconds
            while len(samples_s) < least or time.perf_counter() < end_s:
                samples_s.append(self._case.sample())
        return {"samples_s": samples_s}

    def do_close(self) -> dict[str, Any]:
        """Write the sidecar line of the case and let go of it."""
        gc.unfreeze()
        self._case = None
        importlib.import_module(f"{FOLDER.name}._case_end").end_case()
        return {}

    def _built(self, kind: Any, benchmark: str, params: list[str]) -> Case:
        """Set a case up, from what its suite has found where one measures all its cases at once."""
        axes = [{repr(one): one for one in axis} for axis in axes_of(kind)]
        values = tuple(known[text] for known, text in zip(axes, params, strict=True))
        suite, method = kind(), benchmark.rpartition(".")[2]
        if not hasattr(kind, "setup_cache"):
            suite.setup(*values)
            return Case(suite, values, getattr(suite, method))
        if kind.setup_cache not in self._caches:
            self._caches[kind.setup_cache] = suite.setup_cache()
        arguments = (self._caches[kind.setup_cache], *values)
        suite.setup(*arguments)
        case = Case(suite, arguments, getattr(suite, method))
        case.known_s.extend(case.sample() for _ in range(suite.repeat))
        return case


def suites_of(name: str) -> dict[str, Any]:
    """Return the suites of a module by the names of their benchmarks."""
    module = importlib.import_module(name)
    identity = importlib.import_module(f"{FOLDER.name}._identity").Identity
    return {
        identity.of(one).benchmark: one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == name and not one.__name__.startswith("_")
        if any(method.startswith("time_") for method in dir(one))
    }


def axes_of(suite: Any) -> list[list[Any]]:
    """Return the values of each parameter, as asv reads `params`."""
    several = bool(suite.params) and isinstance(suite.params[0], (list, tuple))
    return [list(axis) for axis in (suite.params if several else [suite.params])]


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(make: Callable[[], Server] = Server) -> None:
    """Import what every case needs, say so, and answer until nothing is asked."""
    answers = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    os.environ[SERVES_VARIABLE] = "1"
    # The package of suites is this one, whichever lies beside the engine that is compared.
    sys.path.insert(0, str(FOLDER.parent))
    importlib.import_module(FOLDER.name)
    del sys.path[0]
    importlib.import_module("torch")
    server = make()
    _say(answers, {})
    for line in sys.stdin:
        _say(answers, server.answer(json.loads(line)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take torch down in good order takes a third of a second


def _say(answers: int, answer: Mapping[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
