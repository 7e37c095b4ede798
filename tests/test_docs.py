"""What the prose says exists: commands, files, targets, backends, verdicts."""

import re
from pathlib import Path

import click
import pytest

from dashboard.cli import main
from db.compare import Verdict
from engine.kernels import OPS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def commands(group, prefix=""):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


COMMANDS = dict(commands(main))


@pytest.mark.parametrize("name", COMMANDS)
def test_readme_lists_every_command(name):
    assert re.search(rf"^\|.*`{re.escape(name)}\b", README, re.MULTILINE)


def test_readme_lists_no_command_that_does_not_exist():
    table = README.split("| command |")[1].split("\n\n")[0]
    listed = re.findall(r"`((?:db |alerts )?[a-z]+)", table)

    assert set(listed) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name):
    command = COMMANDS[name]

    assert f"Example: ddtree-bench {name}" in (command.help or "")
    assert all(option.help for option in command.params if isinstance(option, click.Option))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    named = re.findall(r"`((?:engine|benchmarks|db|dashboard|tests|\.github)/[\w./-]*)`", text)

    missing = [name for name in (*linked, *named) if not (ROOT / name).exists()]
    assert missing == []


def test_readme_names_every_verdict_and_make_target():
    text = README.lower()

    assert [verdict.value for verdict in Verdict if verdict.value not in text] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)`", README)) <= targets


def test_changelog_names_every_backend():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    names = OPS["tree_attention"].implementations
    assert [name for name in names if f"`{name}`" not in changelog] == []
