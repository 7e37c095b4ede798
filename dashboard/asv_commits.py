"""The checkout that is measured: its commits, a worktree for each, and which code lies there."""

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from dashboard.asv_errors import AsvRunError, NotACheckoutError, UnknownRangeError

WORKTREES = Path(".asv") / "worktrees"
DEFINITIONS = ("benchmarks", "asv.conf.json")  # always those of the invoking checkout
ENGINE = "engine"


def checkout(root: Path) -> Path:
    """Return the root, resolved; refuse a folder that asv could not run in."""
    root = root.resolve()
    if not (root / "asv.conf.json").is_file() or not (root / ".git").exists():
        raise NotACheckoutError(
            f"checkout: expected a git checkout with an asv.conf.json, got {root} "
            "(benchmarks are run from their repository)"
        )
    return root


def commits_of(root: Path, text: str | None) -> tuple[str, ...]:
    """Return the full hashes of a revision or a range, oldest first; None is HEAD.

    Of several, parted by spaces, those of each are given in turn, and each commit once.
    """
    if text is None:
        return (git_lines(root, "rev-parse", "--verify", "HEAD")[0],)
    if len(words := text.split()) > 1:
        return tuple(dict.fromkeys(one for word in words for one in commits_of(root, word)))
    is_range = ".." in text or text.endswith(("^!", "^@"))
    try:
        if is_range:
            found = git_lines(
                root, "rev-list", "--first-parent", "--reverse", "--end-of-options", text, "--"
            )
        else:
            revision = f"{text}^{{commit}}"
            found = git_lines(root, "rev-parse", "--verify", "--end-of-options", revision)[-1:]
    except subprocess.CalledProcessError as error:
        raise UnknownRangeError(
            f"commits: expected a revision or a range of this repository, got {text!r} "
            f"(git: {_last_line(error.stderr)})"
        ) from error
    if not found:
        raise UnknownRangeError(f"commits: expected at least one commit, got none in {text!r}")
    return tuple(found)


@contextmanager
def engine_of(root: Path, commit: str, *, isolated: bool) -> Iterator[Path]:
    """Yield a folder whose engine is the commit's: its own worktree, or the checkout itself."""
    if not isolated:
        yield root
        return
    worktree = root / WORKTREES / f"{commit[:12]}-{uuid4().hex[:8]}"
    worktree.parent.mkdir(parents=True, exist_ok=True)
    git_lines(root, "worktree", "add", "--quiet", "--detach", str(worktree), commit)
    try:
        yield worktree
    finally:
        git_lines(root, "worktree", "remove", "--force", str(worktree))


def remove_stale_worktrees(root: Path) -> int:
    """Remove what killed runs left; only for a caller who knows that no other run is under way."""
    stale = sorted((root / WORKTREES).glob("*"))
    for folder in stale:
        shutil.rmtree(folder)
    if stale:
        git_lines(root, "worktree", "prune")
    return len(stale)


def code_digest(root: Path, *, with_engine: bool) -> str:
    """Return a hash of the files that decide what is measured, as they lie there."""
    folders = (*DEFINITIONS, ENGINE) if with_engine else DEFINITIONS
    listed = git_lines(
        root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders
    )
    digest = hashlib.sha256()
    for name in sorted("\n".join(listed).split("\0")):
        path = root / name
        if name and path.is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def git_lines(root: Path, *arguments: str) -> list[str]:
    """Return what git prints, by lines; a failure is the caller's to name."""
    git = shutil.which("git")
    if git is None:
        raise AsvRunError("git: expected it on the path, got none (commits are read with it)")
    outcome = subprocess.run(  # noqa: S603 - no shell; user text comes after --end-of-options
        [git, "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return outcome.stdout.splitlines()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("fatal: ") if lines else "no message"
