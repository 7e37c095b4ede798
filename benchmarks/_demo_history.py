"""A linear history of this engine to try the service on, with known changes among its commits.

`make` puts a branch on top of a commit: most of its commits change nothing that is timed, some move
a number a little, two make something slow and are mended later, one pins a dependency. They touch
no checkout, and have the same hashes wherever they are made. `keep` gathers what was measured of
the branch as a tree worth recording, with the order and the subjects of its commits::

    python -m benchmarks._demo_history make --branch demo            # says which range it made
    ddtree-bench run --profile history --commits RANGE --machine demo
    python -m benchmarks._demo_history keep RANGE --machine demo --to benchmarks/recorded/demo
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RESULTS: Final = Path(".asv") / "results"
INTERPRETER: Final = "/usr/bin/python3"  # what a recorded tree calls the one that measured
BETWEEN_S: Final = 3600  # from a commit to the next, by their dates
IDENTITY: Final = "Demo history"
SPLIT: Final = "engine/kernels/tree_attention/triton_split.py"
TREES: Final = "engine/draft_tree.py"

# Below the kernels: Triton compiles a kernel anew where its line has moved.
LONG: Final = "    if problem.capacity > 32768:\n        return 1  # nothing to merge\n"
CHOICE: Final = "    arch = arch_of(problem.q.device)\n    per_sm ="
READ: Final = "    rows = target_tokens.tolist()\n    return [_walk"
READ_EACH: Final = READ.replace(
    "target_tokens.tolist()", "[[int(token) for token in row] for row in target_tokens]"
)
WARPS, MORE_WARPS = "MERGE_WARPS = 4\n", "MERGE_WARPS = 8\n"
WAVES, FEWER_WAVES = "MOST_WAVES = 16 ", "MOST_WAVES = 8 "
LOOSE, PINNED = '"safetensors>=0.5"', '"safetensors==0.7.0"'

SLOW_SPLIT: Final = "triton_split: one program reads a long context, so that nothing is merged"
MENDED_SPLIT: Final = "triton_split: long contexts are divided again"
SLOW_WALK: Final = "draft tree: a walk takes its tokens one by one"
MENDED_WALK: Final = "draft tree: one read back serves all walks again"
PINS: Final = "packaging: safetensors is pinned"


class DemoError(Exception):
    """The branch cannot be made or kept; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One commit: texts that are replaced in files, each of which is there once."""

    subject: str
    changes: tuple[tuple[str, str, str], ...]  # path, old text, new text


def _note(subject: str, path: str, text: str) -> Edit:
    """Return a commit that adds a line at the end of a file, and changes nothing that is timed."""
    return Edit(subject, ((path, "", text),))


# A level that lasts for less than six results is none to the detector: each lasts eight.
PLAN: Final = (
    _note("readme: where the demo history begins", "README.md", "\n<!-- demo -->\n"),
    _note("decoder: a remark on its stages", "engine/decoder.py", "# Stages are timed apart.\n"),
    _note("tests: a remark on trees", "tests/trees.py", "# Trees are flat lists.\n"),
    Edit("triton_split: merging programs have eight warps", ((SPLIT, WARPS, MORE_WARPS),)),
    _note("errors: a remark on messages", "engine/errors.py", "# One line each.\n"),
    Edit(PINS, (("pyproject.toml", LOOSE, PINNED),)),
    _note("sampling: a remark on noise", "engine/sampling.py", "# Noise has a place.\n"),
    _note("tests: a remark on drafts", "tests/drafts.py", "# Drafts are planted.\n"),
    Edit(SLOW_SPLIT, ((SPLIT, CHOICE, LONG + CHOICE),)),
    _note("sequence: a remark", "engine/sequence.py", "# A sequence ends once.\n"),
    _note("contributing: a line", "CONTRIBUTING.md", "\n<!-- demo -->\n"),
    Edit(SLOW_WALK, ((TREES, READ, READ_EACH),)),
    _note("tests: a remark on ranks", "tests/ranks.py", "# Ranks are small here.\n"),
    _note("cost: a remark on bytes", "engine/cost.py", "# Bytes as stored.\n"),
    _note("observer: a remark on waits", "engine/observer.py", "# It waits, so it is rare.\n"),
    _note("readme: another line", "README.md", "<!-- demo: trees -->\n"),
    Edit(MENDED_SPLIT, ((SPLIT, LONG + CHOICE, CHOICE),)),
    _note("tests: a remark on windows", "tests/windows.py", "# Windows are made up.\n"),
    _note("config: a remark on defaults", "engine/config.py", "# Every choice is named.\n"),
    Edit(MENDED_WALK, ((TREES, READ_EACH, READ),)),
    _note("tests: a remark on cases", "tests/known_cases.py", "# Cases have names.\n"),
    Edit("triton_split: a launch has eight waves at most", ((SPLIT, WAVES, FEWER_WAVES),)),
    _note("trace: a remark on files", "engine/trace.py", "# A line a step.\n"),
    _note("changelog: a line", "CHANGELOG.md", "\n<!-- demo -->\n"),
    Edit("triton_split: merging programs have four warps", ((SPLIT, MORE_WARPS, WARPS),)),
    _note("candidates: a remark on ties", "engine/candidates.py", "# Lower ids first.\n"),
    _note("planted: a remark on regimes", "engine/planted.py", "# A plant is a regime.\n"),
)


def edited(edit: Edit, read: Callable[[str], str]) -> dict[str, str]:
    """Return the texts of a commit's files; `read` gives what they were."""
    texts: dict[str, str] = {}
    for path, old, new in edit.changes:
        text = texts[path] if path in texts else read(path)
        if not old:
            texts[path] = text + new
            continue
        if text.count(old) != 1:
            raise DemoError(
                f"{path}: expected {old.strip()!r} once, got it {text.count(old)} times "
                f"(for {edit.subject!r}; the plan is out of date)"
            )
        texts[path] = text.replace(old, new)
    return texts


def make(repository: Path, onto: str, plan: Sequence[Edit], branch: str) -> str:
    """Make the branch, replaced if it is there; return the range of its commits."""
    base = _git(repository, "rev-parse", "--verify", f"{onto}^{{commit}}")
    began_s = int(_git(repository, "show", "--no-patch", "--format=%ct", base))
    with _worktree(repository, base) as folder:
        for number, edit in enumerate(plan, start=1):
            for path, text in edited(edit, lambda one: (folder / one).read_text("utf-8")).items():
                (folder / path).write_text(text, encoding="utf-8")
            date = f"{began_s + number * BETWEEN_S} +0000"
            _commit(folder, edit.subject, date)
        tip = _git(folder, "rev-parse", "HEAD")
    _git(repository, "branch", "--force", branch, tip)
    return f"{base[:12]}..{tip[:12]}"


@contextmanager
def _worktree(repository: Path, commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "demo"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            _git(repository, "worktree", "remove", "--force", str(folder))


def _commit(folder: Path, subject: str, date: str) -> None:
    """Commit all, so that the hash follows from content, subject and date alone."""
    _git(folder, "add", "--update")
    who = {"NAME": IDENTITY, "EMAIL": "demo@example.org", "DATE": date}
    told = {
        f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()
    }
    words = ("-c", "commit.gpgSign=false", "commit", "--quiet", "--no-verify", "-m", subject)
    _git(folder, *words, **told)


def keep(repository: Path, commits: str, machine: str, to: Path) -> int:
    """Gather results, telemetry and order of a range below `to`; return how many commits it has.

    Commits of the range that were not measured are left out.
    """
    log = ("log", "--reverse", "--first-parent", "--format=%H%x09%at%x09%s", commits)
    subjects = {line.split("\t")[0]: line for line in _git(repository, *log).splitlines()}
    results = repository / RESULTS
    (to / machine).mkdir(parents=True, exist_ok=True)
    (to / "telemetry").mkdir(exist_ok=True)
    shutil.copy(results / "benchmarks.json", to / "benchmarks.json")
    kept: set[str] = set()
    for path in sorted((results / machine).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "machine.json":
            shutil.copy(path, to / machine / path.name)
        elif content["commit_hash"] in subjects:
            _keep_result(content, to / machine)
            kept.add(content["commit_hash"])
    if not kept:
        raise DemoError(f"results: expected some of {commits} on {machine}, found none")
    order = [line for sha, line in subjects.items() if sha in kept]
    (to / "commits.tsv").write_text("\n".join(order) + "\n", encoding="utf-8")
    _keep_lines(results / "telemetry", kept, machine, to / "telemetry" / f"{machine}.jsonl")
    return len(kept)


def _keep_result(content: dict[str, object], folder: Path) -> None:
    """Write a result file that names no path of the machine that measured."""
    name = f"existing-py{INTERPRETER.replace('/', '_')}"
    params = content["params"]
    if isinstance(params, dict):
        content = {**content, "params": {**params, "python": INTERPRETER, "os": _kernel(params)}}
    content = {**content, "env_name": name, "python": INTERPRETER}
    text = json.dumps(content, separators=(",", ":"))
    (folder / f"{str(content['commit_hash'])[:8]}-{name}.json").write_text(text, encoding="utf-8")


def _kernel(params: dict[str, object]) -> str:
    """Return the operating system without the name of its build."""
    return str(params.get("os", "")).split("-")[0]


def _keep_lines(folder: Path, shas: set[str], machine: str, to: Path) -> None:
    """Write the sidecar lines of the commits on the machine, in the order they were measured."""
    files = [path.read_text(encoding="utf-8") for path in folder.glob("*.jsonl")]
    texts = [text for file in files for text in file.splitlines()]
    lines = [json.loads(text) for text in texts]
    ours = [one for one in lines if one["commit"] in shas and one["machine"] == machine]
    ours.sort(key=lambda one: one["started_at"])
    written = (json.dumps(one, separators=(",", ":")) + "\n" for one in ours)
    to.write_text("".join(written), encoding="utf-8")


def _git(folder: Path, *words: str, **environ: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise DemoError("git: expected it on the path, got none")
    outcome = subprocess.run(  # noqa: S603 - no shell, words are ours or named by the user
        [git, "-C", str(folder), *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode:
        last = (outcome.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DemoError(f"git {words[0]}: expected success, got {last}")
    return outcome.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make or keep a demo history."""
    parser = argparse.ArgumentParser(description="a history to try the service on")
    parser.add_argument("--repository", type=Path, default=Path.cwd())
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make", help="put the branch on top of a commit")
    making.add_argument("--onto", default="HEAD")
    making.add_argument("--branch", default="demo")
    keeping = verbs.add_parser("keep", help="gather what was measured of a range")
    keeping.add_argument("commits", metavar="RANGE")
    keeping.add_argument("--machine", required=True)
    keeping.add_argument("--to", type=Path, required=True)
    asked = parser.parse_args(arguments)
    try:
        if asked.verb == "make":
            sys.stdout.write(make(asked.repository, asked.onto, PLAN, asked.branch) + "\n")
        else:
            count = keep(asked.repository, asked.commits, asked.machine, asked.to)
            sys.stdout.write(f"{count} commits in {asked.to}\n")
    except DemoError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
