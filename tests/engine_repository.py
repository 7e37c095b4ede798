"""Our engine and suites as a new repository, each of its commits an edit of the draft tree."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
EDITED = Path("engine") / "draft_tree.py"
LARGEST = "    largest = max((tree.tree_size for tree in trees), default=0)\n"


def git(folder, *words):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def plain():
    """The draft tree as it is."""
    return (ROOT / EDITED).read_text(encoding="utf-8")


def sleeping(seconds=0.005):
    """The same, slower whenever trees are walked."""
    sleep = f"    __import__('time').sleep({seconds})\n"
    slow = plain().replace(LARGEST, LARGEST + sleep, 1)
    assert slow != plain()
    return slow


def make_repository(root, texts):
    """Commit the project once for each text of the draft tree, oldest first; give the hashes."""
    for name in ("engine", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "recorded", "checkpoints")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("asv.conf.json", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", ".")
    commits = []
    for number, text in enumerate(texts):
        (root / EDITED).write_text(text, encoding="utf-8")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", f"commit {number}")
        commits.append(git(root, "rev-parse", "HEAD"))
    return commits
