"""A small tree of asv results, and the command called on a database of its own."""

import json

from click.testing import CliRunner

from dashboard.cli import main
from dashboard.cli_exit import ExitCode
from tests.asv_trees import START_S, AsvTree, row

BASE, SLOWER, BROKEN, THIN = "1a" * 20, "2b" * 20, "3c" * 20, "4d" * 20
MACHINE = "bench-1"
CONTEXTS = ["1024", "2048"]
JITTER = (0.998, 0.999, 0.9995, 1.0, 1.0, 1.0005, 1.001, 1.002)
DAY_S = 86_400


def empty_tree(root):
    """A tree whose one benchmark has two contexts."""
    return AsvTree(root, MACHINE).benchmark(params=[CONTEXTS], names=["context"])


def small_tree(root):
    """Four commits: a base, one a fifth slower, one that fails, one measured once."""
    tree = empty_tree(root)
    add_run(tree, BASE, [0.010, 0.020], day=0)
    add_run(tree, SLOWER, [0.010, 0.024], day=1)
    add_run(tree, BROKEN, [0.010, None], day=2)
    add_run(tree, THIN, [0.010, 0.020], day=3, repeat=1)
    return tree


def add_run(tree, commit, values, *, day, repeat=len(JITTER)):  # noqa: B008 - a constant's length
    """Add one commit's results: a value, or None for a failure, for each context."""
    samples = [None if v is None else [v * one for one in JITTER[:repeat]] for v in values]
    start_ms = (START_S + day * DAY_S) * 1000
    repeats = [None if v is None else repeat for v in values]
    cells = row(
        values, params=[CONTEXTS], samples=samples, started_at=start_ms, stats_repeat=repeats
    )
    tree.results({"step.Step.time_step": cells}, commit, date=start_ms)


def add_window(tree, commit, context, *, time_s, day, **more):
    """Add what a card showed that read a gigabyte far too slowly."""
    start_s = START_S + day * DAY_S
    tree.line(
        benchmark="step.Step.time_step",
        params=[str(context)],
        commit=commit,
        machine=MACHINE,
        n=len(JITTER),
        median_s=time_s,
        samples_s=[time_s * one for one in JITTER],
        started_at=start_s + 0.5,
        ended_at=start_s + 1.0,
        timer="cuda_events",
        bytes=context * 1_000_000,
        kv_bytes=context * 1_000_000,
        context_tokens=context,
        ceilings={
            "read_bytes_per_s": 1e12,
            "matmul_flops_per_s": None,
            "source": "measured",
            "dtype": None,
        },
        **more,
    )


def command_on(url):
    """Call the command in this process; standard output and error are kept apart."""

    def invoke(*arguments, **environment):
        known = {"GITHUB_TOKEN": None, "GITHUB_API_URL": None, "COLUMNS": None} | environment
        words = ["--db", url, *arguments]
        return CliRunner().invoke(main, words, env=known, prog_name="ddtree-bench")

    return invoke


def strict(text):
    """Parse JSON as everybody else's parser does."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def one_line(result, status=ExitCode.BAD_INPUT):
    """The one line on standard error that a refusal consists of."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("ddtree-bench")
    return line
