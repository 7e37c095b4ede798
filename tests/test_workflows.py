"""The workflows: what they may do, what they run, and that they run what exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from dashboard.cli import main
from dashboard.cli_exit import ExitCode
from db.gate import read_policies

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".github" / "workflows"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def load(name):
    # YAML 1.1 reads the key `on` as true.
    document = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    document["on"] = document.pop(True)
    return document


def jobs(name):
    return load(name)["jobs"].values()


def steps(name):
    return [step for job in jobs(name) for step in job["steps"]]


def scripts(name):
    return [step["run"] for step in steps(name) if "run" in step]


def test_there_is_one_workflow_to_test_two_to_measure_and_one_to_comment():
    assert NAMES == ["bench.yml", "comment.yml", "nightly.yml", "tests.yml"]


def test_testing_a_forks_code_meets_no_secret_no_writing_token_and_no_runner_of_ours():
    text = (FOLDER / "tests.yml").read_text(encoding="utf-8")

    assert load("tests.yml")["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    assert [job["runs-on"] for job in jobs("tests.yml")] == ["ubuntu-latest"]
    assert all("permissions" not in job for job in jobs("tests.yml"))


def test_runners_page_names_the_labels_the_secret_and_the_setting():
    page = (FOLDER.parent / "RUNNERS.md").read_text(encoding="utf-8")

    for name in ("bench.yml", "nightly.yml"):
        assert ",".join(next(iter(jobs(name)))["runs-on"][1:]) in page
    assert "DDTREE_BENCH_DB" in page
    assert "require approval for all external contributors" in page
    assert "label `benchmark`" in page


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_by_commit_with_their_version_beside(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    uses = re.findall(r"uses: *(.+)", text)

    assert uses
    for line in uses:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_all_workflows_pin_one_version_of_an_action():
    pins = re.findall(
        r"uses: *(\S+)@(\S+)",
        "".join((FOLDER / name).read_text(encoding="utf-8") for name in NAMES),
    )

    assert len(dict(pins)) == len(set(pins))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_on_pull_request_target(name):
    assert "pull_request_target" not in load(name)["on"]


def test_measuring_may_only_read():
    assert load("bench.yml")["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in jobs("bench.yml"))


def test_commenting_may_read_results_and_write_the_comment_only():
    assert load("comment.yml")["permissions"] == {}
    assert [job["permissions"] for job in jobs("comment.yml")] == [
        {"actions": "read", "checks": "write", "contents": "read", "pull-requests": "write"}
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_checkout_leaves_a_token_behind(name):
    checkouts = [step for step in steps(name) if "actions/checkout@" in step.get("uses", "")]

    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert all(step["with"]["fetch-depth"] == 0 for step in checkouts)


def test_commenting_checks_out_the_default_branch_only():
    refs = [
        step["with"]["ref"] for step in steps("comment.yml") if "checkout@" in step.get("uses", "")
    ]

    assert refs == ["${{ github.event.repository.default_branch }}"]
    assert not any(
        re.search(r"git (checkout|switch|merge|pull|reset|worktree)", script)
        for script in scripts("comment.yml")
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_expression_is_pasted_into_a_script(name):
    assert not any("${{" in script for script in scripts(name))


def test_pull_requests_are_measured_by_label_event_on_the_labelled_runner():
    assert load("bench.yml")["on"]["pull_request"] == {"types": ["labeled"]}
    (job,) = jobs("bench.yml")
    assert job["runs-on"] == ["self-hosted", "gpu", "blackwell"]
    assert "github.event.label.name == 'benchmark'" in job["if"]
    assert "labels" not in job["if"]


def test_one_job_uses_the_gpu_at_a_time():
    on_gpu = [job for name in NAMES for job in jobs(name) if "self-hosted" in job["runs-on"]]

    assert len(on_gpu) == 2
    for job in on_gpu:
        assert job["runs-on"] == ["self-hosted", "gpu", "blackwell"]
        assert job["concurrency"] == {"group": "gpu-blackwell", "cancel-in-progress": False}


def test_nights_measure_without_a_writing_token_and_write_without_measuring():
    nightly = load("nightly.yml")
    measure, write = nightly["jobs"]["measure"], nightly["jobs"]["issues"]

    assert set(nightly["on"]) == {"schedule", "workflow_dispatch"}
    assert measure["if"] == "github.ref == 'refs/heads/main'"
    assert (nightly["permissions"], measure["permissions"]) == ({}, {"contents": "read"})
    assert write["permissions"] == {"actions": "read", "contents": "read", "issues": "write"}
    assert (write["runs-on"], write["needs"]) == ("ubuntu-latest", "measure")
    assert "secrets" not in str(write)
    ran = " ".join(step.get("run", "") for step in write["steps"])
    assert "ddtree-bench alerts issues" in ran
    assert not re.search(r"ddtree-bench run|make |unzip|download-artifact", ran)


def test_nights_hand_over_the_findings_under_one_name():
    nightly = load("nightly.yml")["jobs"]
    (upload,) = [one for one in nightly["measure"]["steps"] if "-artifact@" in one.get("uses", "")]

    (fetch,) = [one for one in nightly["issues"]["steps"] if "gh api" in one.get("run", "")]
    assert f"artifacts?name={upload['with']['name']}" in fetch["run"]
    assert "alerts confirm" in next(
        one["run"] for one in nightly["measure"]["steps"] if "alerts findings" in one.get("run", "")
    )


def test_machine_is_examined_before_anything_is_measured_on_it():
    for name in ("bench.yml", "nightly.yml"):
        ran = scripts(name)
        place = next(place for place, script in enumerate(ran) if "ddtree-bench doctor" in script)
        assert ran[place].endswith("|| test $? -eq 5")
        assert not any("ddtree-bench run" in script for script in ran[:place])
        assert any("ddtree-bench run" in script for script in ran[place:])


def test_base_that_fails_does_not_keep_the_head_from_being_measured(tmp_path):
    (script,) = [script for script in scripts("bench.yml") if "merge-base" in script]
    tool = tmp_path / ".venv" / "bin" / "ddtree-bench"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        '#!/bin/sh\necho "$@" >> calls\ncase "$*" in run*) exit 4;; compare*) exit 3;; confirm*) echo "{}"; exit 3;; esac\n'
    )
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\necho base\n")
    for program in (tool, git):
        program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HEAD": "head",
        "TARGET": "main",
        "MACHINE": "m",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "RUNNER_TEMP": str(tmp_path),
    }

    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=False)

    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["run", "compare", "confirm"]
    assert calls[0].endswith("--in-turns --commits base^! head^!")
    assert (tmp_path / ".asv" / "results" / "confirmed.json").read_text() == "{}\n"
    assert done.returncode == ExitCode.FAILED


def test_shared_database_is_handed_to_main_only():
    secrets = re.findall(
        r"\$\{\{.*secrets.*\}\}", (FOLDER / "bench.yml").read_text(encoding="utf-8")
    )

    assert secrets == ["${{ github.event_name == 'push' && secrets.DDTREE_BENCH_DB || '' }}"]
    assert "secrets." not in (FOLDER / "comment.yml").read_text(encoding="utf-8")


def test_commenting_follows_the_measuring_workflow_by_its_name():
    assert load("comment.yml")["on"] == {
        "workflow_run": {"workflows": [load("bench.yml")["name"]], "types": ["completed"]}
    }


def test_results_are_uploaded_and_fetched_under_one_name():
    (upload,) = [step for step in steps("bench.yml") if "-artifact@" in step.get("uses", "")]
    fetched = [script for script in scripts("comment.yml") if "gh api" in script]

    assert upload["with"]["name"] == "asv-results"
    assert len(fetched) == 1
    assert "artifacts?name=asv-results" in fetched[0]


def test_nothing_but_the_guarded_command_opens_the_archive():
    text = (FOLDER / "comment.yml").read_text(encoding="utf-8")

    assert not re.search(r"unzip|zipfile|download-artifact|ddtree-bench ingest", text)
    (said,) = [script for script in scripts("comment.yml") if "ddtree-bench comment" in script]
    assert '--artifact "$RUNNER_TEMP/results.zip"' in said
    assert not re.search(r"--pr |--base ", said)


def test_check_fails_for_what_is_confirmed_by_the_policies_of_the_target_branch():
    (said,) = [script for script in scripts("comment.yml") if "ddtree-bench comment" in script]

    assert "--fail-on confirmed --base-policy .github/gate.toml" in said
    assert not re.search(r"--policy\b", said.replace("--base-policy", ""))
    assert any(not one.required for one in read_policies(FOLDER.parent / "gate.toml").suites)


@pytest.mark.parametrize("name", ["bench.yml", "comment.yml", "nightly.yml"])
def test_every_command_and_option_in_a_workflow_exists(name):
    called = [
        words.split()
        for script in scripts(name)
        for words in re.findall(r"(?:^|[ /])ddtree-bench ([^\n]+)", script)
    ]

    assert called
    for words in called:
        command, options = main, {"--db"}
        for word in words:
            if isinstance(command, click.Group) and word in command.commands:
                command = command.commands[word]
                options |= {flag for param in command.params for flag in param.opts}
            elif word.startswith("--"):
                assert word in options, f"{word} of {' '.join(words)}"
        assert not isinstance(command, click.Group), " ".join(words)


def test_shellcheck_finds_nothing_in_any_script(tmp_path):
    paths = [FOLDER.parent / "install-reader.sh"]
    for name in NAMES:
        for number, script in enumerate(scripts(name)):
            paths.append(tmp_path / f"{name}-{number}.sh")
            paths[-1].write_text(f"#!/bin/bash -e\n{script}\n", encoding="utf-8")

    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", *paths],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_githubs_schema_of_workflows_is_kept():
    checker = ("-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows")
    paths = [FOLDER / name for name in NAMES]

    done = subprocess.run(
        [sys.executable, *checker, *paths], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout


def test_auditor_of_workflows_finds_nothing_but_what_is_answered_for():
    """Injection, caches that are poisoned, tokens left behind, permissions, pins, triggers."""
    told = ("--offline", "--no-progress", "--quiet", "--format=plain")

    done = subprocess.run(
        [Path(sys.executable).parent / "zizmor", *told, FOLDER],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    ignored = re.findall(
        r"zizmor: ignore\[(.+)\]",
        "".join((FOLDER / name).read_text(encoding="utf-8") for name in NAMES),
    )
    assert ignored == ["dangerous-triggers"]


EVENTS = {"push", "pull_request", "workflow_dispatch", "workflow_run", "schedule"}
KEYS = {  # what a mistyped key would be ignored for
    "": {"name", "on", "permissions", "concurrency", "jobs"},
    "job": {
        "if",
        "needs",
        "runs-on",
        "timeout-minutes",
        "permissions",
        "concurrency",
        "env",
        "steps",
    },
    "step": {"name", "if", "env", "run", "uses", "with"},
}


@pytest.mark.parametrize("name", NAMES)
def test_workflow_holds_only_keys_events_and_permissions_that_github_knows(name):
    workflow = load(name)

    assert set(workflow) <= KEYS[""]
    assert set(workflow["on"]) <= EVENTS
    for job in jobs(name):
        assert set(job) <= KEYS["job"]
        assert job["timeout-minutes"] <= 360
        granted = job.get("permissions", workflow["permissions"])
        assert set(granted.values()) <= {"read", "write"}
        assert set(granted) <= {"actions", "checks", "contents", "issues", "pull-requests"}
        for step in job["steps"]:
            assert set(step) <= KEYS["step"]
            assert ("run" in step) != ("uses" in step)


@pytest.mark.parametrize("name", NAMES)
def test_no_job_that_runs_measured_code_holds_a_token_that_may_write(name):
    workflow = load(name)
    for job in jobs(name):
        ran = " ".join(step.get("run", "") for step in job["steps"])
        granted = job.get("permissions", workflow["permissions"])
        if re.search(r"make |ddtree-bench run", ran):
            assert set(granted.values()) == {"read"}
            assert "github.token" not in str(job)


@pytest.mark.parametrize("name", NAMES)
def test_what_anybody_may_write_is_read_from_the_environment_only(name):
    """Titles, branches and labels reach no script, no path and no file as an expression."""
    untrusted = re.compile(
        r"github\.(event\.(pull_request\.(title|body|head\.(ref|label))|.*(title|body|message|name)\b)|head_ref)"
    )
    for job in jobs(name):
        for step in job["steps"]:
            assert not untrusted.search(str({**step, "env": None, "if": None}))


def test_requirements_of_the_readers_leave_out_what_is_heavy(tmp_path):
    path = f"{tmp_path}:{os.environ['PATH']}"
    python = tmp_path / "python"  # ours, that installs nothing
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) echo "$@" >> "$RUNNER_TEMP/calls";; *) exec {sys.executable} "$@";; esac\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "RUNNER_TEMP": str(tmp_path), "PATH": path}
    subprocess.run(["sh", ".github/install-reader.sh"], cwd=ROOT, env=environment, check=True)

    lines = (tmp_path / "requirements.txt").read_text().split("\n")
    names = {re.split(r"[><=\[ ]", line)[0] for line in lines if line}
    assert {"alembic", "click", "httpx", "pandas", "rich", "sqlalchemy"} <= names
    assert names.isdisjoint({"torch", "triton", "streamlit", "vl-convert-python"})
    assert (tmp_path / "calls").read_text().count("-m pip install") == 2
    for name in ("comment.yml", "nightly.yml"):
        assert "sh .github/install-reader.sh" in scripts(name)
