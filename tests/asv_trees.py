"""asv results trees, sidecars and git repositories for tests, written as asv and the suites do."""

import json
import shutil
import subprocess
import uuid
from pathlib import Path

COLUMNS = [
    "result",
    "params",
    "version",
    "started_at",
    "duration",
    "stats_ci_99_a",
    "stats_ci_99_b",
    "stats_q_25",
    "stats_q_75",
    "stats_number",
    "stats_repeat",
    "samples",
    "profile",
]
BENCHMARK = "step.Step.time_step"
SHA = "a" * 40
START_S = 1_780_000_000
NAN, INF = float("nan"), float("inf")


class AsvTree:
    """A results folder that grows call by call."""

    def __init__(self, root, machine="laptop"):
        self.root = Path(root)
        self.machine = machine
        self.declared = {}
        (self.root / machine).mkdir(parents=True)
        self.write(f"{machine}/machine.json", {"machine": machine, "cpu": "x", "version": 1})
        self.write("benchmarks.json", {"version": 2})

    def write(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def benchmark(self, name=BENCHMARK, params=(), names=(), **more):
        self.declared[name] = {
            "name": name,
            "param_names": list(names),
            "params": [list(values) for values in params],
            "type": "time",
            "unit": "seconds",
            "version": "1",
        } | more
        self.write("benchmarks.json", self.declared | {"version": 2})
        return self

    def results(self, rows, commit=SHA, *, environment="virtualenv-py3.11", **more):
        """Write a result file; `rows` are lists in asv's columns or dicts by column."""
        named = {
            name: _trimmed([row.get(column) for column in COLUMNS])
            if isinstance(row, dict)
            else row
            for name, row in rows.items()
        }
        content = {
            "commit_hash": commit,
            "env_name": environment,
            "date": START_S * 1000,
            "params": {"machine": self.machine},
            "python": "3.11",
            "requirements": {},
            "env_vars": {},
            "result_columns": COLUMNS,
            "results": named,
            "durations": {},
            "version": 2,
        } | more
        return self.write(f"{self.machine}/{commit[:8]}-{environment}.json", content)

    def line(self, file="run.jsonl", **more):
        """Append a sidecar line."""
        return append_line(self.root / "telemetry" / file, **more)


def row(value=0.01, *, params=(), samples=None, started_at=START_S * 1000, **more):
    """One benchmark's row, with statistics where the value is one."""
    values = value if isinstance(value, list) else [value]
    found = {
        "result": values,
        "params": [list(one) for one in params],
        "version": "1",
        "started_at": started_at,
        "duration": 10.0,
        "stats_ci_99_a": [None if one is None else one * 0.98 for one in values],
        "stats_ci_99_b": [None if one is None else one * 1.02 for one in values],
        "stats_q_25": [None if one is None else one * 0.99 for one in values],
        "stats_q_75": [None if one is None else one * 1.01 for one in values],
        "stats_number": [None if one is None else 1 for one in values],
        "stats_repeat": [None if one is None else 4 for one in values],
        "samples": samples,
    }
    return found | more


def sidecar_line(**more):
    """One line of the sidecar's schema 1, all keys present."""
    line = {
        "schema": 1,
        "benchmark": BENCHMARK,
        "params": [],
        "version": "1",
        "window_id": uuid.uuid4().hex,
        "run_id": "run-1",
        "commit": SHA,
        "machine": "laptop",
        "process_number": 0,
        "pid": 4711,
        "n": 2,
        "median_s": 0.01,
        "samples_s": [0.009, 0.011],
        "started_at": START_S + 1.0,
        "ended_at": START_S + 2.0,
        "timer": "wall",
        "stage_seconds": None,
        "commit_length": None,
        "bytes": None,
        "kv_bytes": None,
        "flops": None,
        "context_tokens": None,
        "programs": None,
        "ceilings": {
            "read_bytes_per_s": None,
            "matmul_flops_per_s": None,
            "source": "measured",
            "dtype": None,
        },
        "device": {
            "kind": "cpu",
            "name": "EPYC",
            "gpu_uuid": None,
            "driver": None,
            "power_limit_w": None,
            "num_sms": None,
            "runtime": None,
        },
        "counters": {},
        "validity": [],
        "provenance": {
            "engine_file": "engine/__init__.py",
            "engine_tree": None,
            "dirty": None,
            "external": False,
            "source": None,
        },
    }
    for key, value in more.items():
        known = line[key]
        line[key] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
    return line


def append_line(path, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    line = sidecar_line(**more)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return line


class GitRepository:
    """A repository whose commits differ in engine/."""

    def __init__(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments, date=START_S):
        outcome = subprocess.run(
            ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *arguments],
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "GIT_AUTHOR_DATE": f"{date} +0000",
                "GIT_COMMITTER_DATE": f"{date} +0000",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_CONFIG_SYSTEM": "/dev/null",
            },
        )
        return outcome.stdout.strip()

    def commit(self, subject, code=None, *, date=START_S):
        (self.root / "engine").mkdir(exist_ok=True)
        (self.root / "engine" / "step.py").write_text(code or subject, encoding="utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", subject, date=date)
        return self.git("rev-parse", "HEAD")

    def configure_asv(self, project):
        """Give it the asv.conf.json and the plugins of `project`; return its folder of suites."""
        suites = self.root / "benchmarks"
        suites.mkdir()
        for pattern in ("_asv_*.py", "_regimes.py"):
            for path in (project / "benchmarks").glob(pattern):
                shutil.copy(path, suites / path.name)
        shutil.copy(project / "benchmarks" / "__init__.py", suites / "__init__.py")
        shutil.copy(project / "asv.conf.json", self.root / "asv.conf.json")
        (self.root / ".gitignore").write_text(".asv/\n__pycache__/\n*.db\n", encoding="utf-8")
        return suites

    def engine_tree(self, sha):
        return self.git("rev-parse", f"{sha}:engine")


def _trimmed(values):
    while values and values[-1] is None:
        values.pop()
    return values
