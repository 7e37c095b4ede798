"""What git says of commits: order, subjects, author dates, and whose engine a commit holds.

Reads only, a handful of git calls whatever the number of commits. Knows no database.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from db.errors import IngestError
from db.json_files import read_bytes

MAIN_BRANCHES = ("main", "master")
ENGINE = "engine"
FIELD = "\x1f"
WHOLE_NUMBER = re.compile("-?[0-9]{1,18}")
NAMED = ("--refs=refs/heads/*", "--refs=refs/remotes/*")
BEFORE_TIP = re.compile(r"[~^].*")  # how far before the tip a commit lies
LONGEST_BRANCH = 200
LONGEST_LINE = 10_000  # characters of a recorded subject with its hash
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
LOG_FORMAT = FIELD.join(("%H", "%P", "%at", "%s"))


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """A commit as a history knows it."""

    sha: str
    authored_at_s: int
    subject: str
    branch: str | None  # the main branch if on its first-parent chain
    position: int | None  # among the commits of the same source; None where order is not known
    merge_base: str | None = None  # newest commit of that chain that it holds; None: not known
    merge_base_position: int | None = None
    side_branch: str | None = None  # which has it where the main branch has not


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository on this machine."""

    root: Path
    git: str

    def known(self, shas: Iterable[str]) -> set[str]:
        """Give those of the commits that are in the repository."""
        asked = [sha for sha in dict.fromkeys(shas) if HASH.fullmatch(sha)]
        answers = self._kinds([f"{sha}^{{commit}}" for sha in asked])
        return {sha for sha, answer in zip(asked, answers, strict=True) if answer is not None}

    def resolve(self, name: str) -> str | None:
        """Give the full hash of the commit that a name stands for; None where there is none."""
        if name.startswith("-") or any(letter.isspace() for letter in name):
            return None
        return self._kinds([f"{name}^{{commit}}"])[0]

    def committed_at_s(self, sha: str) -> int | None:
        """Give a commit's date; None where the repository does not have it."""
        if not self.known([sha]):
            return None
        return int(self._run(["show", "--no-patch", "--format=%ct", sha]))

    def engine_trees(self, shas: Iterable[str]) -> dict[str, str | None]:
        """Give the hash of engine/ in each known commit; None in one without it."""
        asked = sorted(self.known(shas))
        answers = self._kinds([f"{sha}:{ENGINE}" for sha in asked])
        return dict(zip(asked, answers, strict=True))

    def history(self, shas: Iterable[str]) -> dict[str, CommitInfo]:
        """Give what is known of the commits, ranked so that a parent comes before its children.

        On the first-parent chain of the main branch the ranks are the chain's order. A shallow
        clone does not know the order: parents of its oldest commits are missing.
        """
        wanted = self.known(shas)
        if not wanted:
            return {}
        branch, tips = self._main_branch()
        lines = self._run(
            ["log", "--topo-order", "--reverse", "--stdin", f"--format={LOG_FORMAT}"],
            "\n".join([*tips, *sorted(wanted)]),
        ).split("\n")
        rows = [line.split(FIELD, 3) for line in lines if FIELD in line]
        graph = _Graph({row[0]: row[1].split() for row in rows}, tips)
        shallow = self._run(["rev-parse", "--is-shallow-repository"]).strip() == "true"
        sides = self._side_branches(graph.beside(wanted))
        found = {}
        for sha, _, authored_at, subject in rows:
            if sha not in wanted:
                continue
            base = graph.merge_base(sha)
            found[sha] = CommitInfo(
                sha,
                int(authored_at),
                subject,
                branch if sha in graph.chain else None,
                None if shallow else graph.position[sha],
                merge_base=None if shallow else base,
                merge_base_position=None if shallow or base is None else graph.position[base],
                side_branch=sides.get(sha),
            )
        return found

    def _side_branches(self, shas: Sequence[str]) -> dict[str, str]:
        """Give a branch that has each commit: the one from which it is least far."""
        if not shas:
            return {}
        excluded = (f"--exclude={name}" for name in (*MAIN_BRANCHES, "origin/HEAD", "HEAD"))
        answers = self._run(
            ["name-rev", "--annotate-stdin", "--name-only", *NAMED, *excluded],
            "\n".join(shas) + "\n",
        ).splitlines()
        named = zip(shas, answers, strict=True)
        return {
            sha: BEFORE_TIP.sub("", name).removeprefix("remotes/")[:LONGEST_BRANCH]
            for sha, name in named
            if name != sha
        }

    def _main_branch(self) -> tuple[str, list[str]]:
        """Give the main branch's name and its tips, here and at the origin; else HEAD."""
        for name in MAIN_BRANCHES:
            refs = self._run(
                [
                    "for-each-ref",
                    "--format=%(objectname)",
                    f"refs/heads/{name}",
                    f"refs/remotes/origin/{name}",
                ]
            ).split()
            if refs:
                return name, refs
        return "HEAD", self._run(["rev-parse", "HEAD"]).split()

    def _kinds(self, names: Sequence[str]) -> list[str | None]:
        """Give the hash each name stands for, None where it stands for nothing."""
        if not names:
            return []
        answers = self._run(["cat-file", "--batch-check"], "\n".join(names) + "\n").splitlines()
        return [
            None if line.endswith((" missing", " ambiguous")) else line.split()[0]
            for line in answers
        ]

    def _run(self, arguments: Sequence[str], text: str | None = None) -> str:
        outcome = subprocess.run(  # noqa: S603 - no shell; hashes go through standard input
            [self.git, "-C", str(self.root), *arguments],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if outcome.returncode != 0:
            reason = outcome.stderr.strip().splitlines() or ["no reason given"]
            raise IngestError(f"git {arguments[0]}: expected an answer, got {reason[0]}")
        return outcome.stdout


def open_repository(path: Path) -> Repository | None:
    """Give the repository a folder lies in; None where there is none or no git."""
    git = shutil.which("git")
    if git is None or not path.is_dir():
        return None
    outcome = subprocess.run(  # noqa: S603 - no shell, every word is ours
        [git, "-C", str(path), "rev-parse", "--git-dir"], capture_output=True, check=False
    )
    return Repository(path, git) if outcome.returncode == 0 else None


def read_recorded_order(path: Path) -> list[CommitInfo]:
    """Read commits.tsv: what `git log --reverse --first-parent --format=%H%x09%at%x09%s` wrote.

    Raises
    ------
    IngestError
        A line has not three fields, or no number in the second.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise IngestError(f"{path}: expected UTF-8, got another text ({error.reason})") from None
    lines = text.removesuffix("\n").split("\n") if text else []
    return [_recorded(line, number, f"{path}:{number + 1}") for number, line in enumerate(lines)]


def _recorded(line: str, number: int, where: str) -> CommitInfo:
    fields = line.split("\t", 2)
    if len(fields) < 3 or not WHOLE_NUMBER.fullmatch(fields[1]):
        raise IngestError(f"{where}: expected hash, author time and subject between tabs")
    sha, authored_at, subject = fields
    if not sha or len(line) > LONGEST_LINE or "\0" in line:
        raise IngestError(f"{where}: expected a hash and a subject of one line, got {line!r:.80}")
    return CommitInfo(sha, int(authored_at), subject, None, number)


class _Graph:
    """Commits by their parents, which come before them, and the main branch among them."""

    def __init__(self, parents: dict[str, list[str]], tips: Sequence[str]) -> None:
        self.position = {sha: number for number, sha in enumerate(parents)}
        self.chain = _first_parent_chain(tips, parents)
        self._in_main: set[str] = set()
        waiting = list(tips)
        while waiting:
            sha = waiting.pop()
            if sha in parents and sha not in self._in_main:
                self._in_main.add(sha)
                waiting += parents[sha]
        self._bases: dict[str, str | None] = {}
        for sha, above in parents.items():
            held = [base for one in above if (base := self._bases.get(one)) is not None]
            newest = max(held, key=self.position.__getitem__, default=None)
            self._bases[sha] = sha if sha in self.chain else newest

    def merge_base(self, sha: str) -> str | None:
        """Give the newest commit of the main branch that a commit holds; itself if on it."""
        return self._bases[sha]

    def beside(self, shas: Iterable[str]) -> list[str]:
        """Give those of the commits that the main branch does not hold."""
        return sorted(sha for sha in shas if sha in self.position and sha not in self._in_main)


def _first_parent_chain(tips: Sequence[str], parents: dict[str, list[str]]) -> set[str]:
    chain: set[str] = set()
    for tip in tips:
        sha: str | None = tip
        while sha is not None and sha not in chain:
            chain.add(sha)
            above = parents.get(sha, [])
            sha = above[0] if above else None
    return chain
