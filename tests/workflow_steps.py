"""A workflow's jobs run from their YAML: steps in order, with the environment that GitHub gives.

What a step `uses` is done in its place (a checkout, an upload); what it runs is run as it stands,
by `bash -e`. Expressions and conditions are looked up in a table, so a new one fails here first.
Three programs are replaced on the path: `make`, which would install, `gh`, which asks the stub, and
`python`, whose pip installs nothing. Profile `full` becomes `quick` of a few cases, as nobody waits
a day for a CPU.
"""

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from werkzeug import Response

ROOT = Path(__file__).parent.parent
BOT = "github-actions[bot]"
OUR_CODE = ("dashboard", "db", ".github")

MAKE = """#!/bin/sh
mkdir -p .venv/bin
cp "$TEST_BIN/ddtree-bench" .venv/bin/ddtree-bench
"""
BENCH = """#!{python}
import os, sys
words = ["quick" if word == "full" else word for word in sys.argv[1:]]
if "run" in words:
    words += ["--bench", os.environ["TEST_CASES"]]
sys.path.insert(0, os.getcwd())
sys.argv = ["ddtree-bench", *words]
from dashboard.cli import main
main(prog_name="ddtree-bench")
"""
PYTHON = """#!/bin/sh
case "$*" in *"-m pip"*) ;; *) exec {python} "$@" ;; esac
"""
GH = """#!{python}
import json, os, sys, urllib.request
assert sys.argv[1] == "api", sys.argv
request = urllib.request.Request(os.environ["GITHUB_API_URL"] + "/" + sys.argv[2])
request.add_header("Authorization", "Bearer " + os.environ["GH_TOKEN"])
content = urllib.request.urlopen(request).read()
if "--jq" in sys.argv:
    assert sys.argv[sys.argv.index("--jq") + 1] == ".artifacts[0].id"
    content = str(json.loads(content)["artifacts"][0]["id"]).encode()
sys.stdout.buffer.write(content)
"""


def load(name):
    """A workflow's YAML, whose key `on` YAML 1.1 reads as true."""
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    document["on"] = document.pop(True)
    return document


@dataclass
class Runner:
    """A machine for one job, empty before it."""

    folder: Path
    origin: Path  # the repository on the forge
    api_url: str
    values: dict  # of expressions, by their text
    cases: str  # regular expression of what is measured
    artifacts: dict = field(default_factory=dict)  # name -> zip file, shared by jobs
    log: list = field(default_factory=list)  # of steps: name, exit status, output, seconds

    def run(self, job):
        """Run a job's steps; return the first status that is none of success."""
        self.folder.mkdir()
        work, temp, tools = (self.folder / name for name in ("work", "temp", "bin"))
        temp.mkdir()
        self._tools(tools)
        environ = self._environ(work, temp, tools) | self._texts(job.get("env", {}))
        failed = 0
        for step in job["steps"]:
            asked = step.get("if", "success()")
            if not (asked == "always()" or (not failed and self.value(asked))):
                continue
            told = environ | self._texts(step.get("env", {}))
            if "uses" in step:
                self._use(step, work, environ)
                continue
            status = self._shell(step, work, told)
            failed = failed or status
            for line in (temp / "env").read_text().splitlines():
                name, _, value = line.partition("=")
                environ[name] = value
        return failed

    def value(self, text):
        """The value of a text that is an expression or holds some."""
        text = " ".join(str(text).split())
        if text in {"success()", "always()"}:
            return True
        if text in self.values:
            return self.values[text]
        parts = text.split("${{")
        found = parts[0]
        for part in parts[1:]:
            expression, _, rest = part.partition("}}")
            found += str(self.values[expression.strip()]) + rest
        if len(parts) == 1 and ("github." in text or "==" in text):
            raise KeyError(text)
        return found

    def _texts(self, env):
        return {name: str(self.value(text)) for name, text in env.items()}

    def _environ(self, work, temp, tools):
        for name in ("env", "summary"):
            (temp / name).touch()
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
        return kept | {
            "CI": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "GITHUB_ACTIONS": "true",
            "GITHUB_API_URL": self.api_url,
            "GITHUB_ENV": str(temp / "env"),
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_RUN_ID": "77",
            "GITHUB_STEP_SUMMARY": str(temp / "summary"),
            "GITHUB_WORKSPACE": str(work),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RUNNER_TEMP": str(temp),
            "TEST_BIN": str(tools),
            "TEST_CASES": self.cases,
        }

    @staticmethod
    def _tools(tools):
        tools.mkdir()
        texts = {"make": MAKE, "ddtree-bench": BENCH, "python": PYTHON, "gh": GH}
        for name, text in texts.items():
            program = tools / name
            program.write_text(text.replace("{python}", sys.executable), encoding="utf-8")
            program.chmod(0o755)

    def _use(self, step, work, environ):
        action, given = step["uses"].split("@")[0], step.get("with", {})
        if action == "actions/checkout":
            ref = given["ref"].replace("${{ env.HEAD }}", environ.get("HEAD", ""))
            commands = [
                ["git", "clone", "--quiet", str(self.origin), str(work)],
                ["git", "-C", str(work), "checkout", "--quiet", "--detach", self.value(ref)],
            ]
            for command in commands:
                subprocess.run(command, check=True, capture_output=True)
        elif action == "actions/upload-artifact":
            path = work / self.value(given["path"])
            files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
            assert files, given
            base = path.parent if path.is_file() else path
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
                for one in files:
                    made.write(one, one.relative_to(base))
            self.artifacts[given["name"]] = content.getvalue()
        else:
            assert action == "actions/setup-python", action

    def _shell(self, step, work, environ):
        work.mkdir(exist_ok=True)
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=work,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{done.stdout}{done.stderr}"
        took_s = time.monotonic() - began
        self.log.append((step.get("name", step["run"]), done.returncode, said, took_s))
        return done.returncode

    @property
    def summary(self):
        """What the job wrote for its page."""
        return (self.folder / "temp" / "summary").read_text(encoding="utf-8")

    def times(self):
        """How long each step took, those that take a second."""
        return ", ".join(f"{name}: {took:.0f} s" for name, _, _, took in self.log if took >= 1.0)

    def said(self):
        """All steps and what they printed, for a failing test."""
        return "\n".join(
            f"== {name} [{status}, {took_s:.1f} s]\n{text[-3000:]}"
            for name, status, text, took_s in self.log
        )


class Forge:
    """GitHub's side of one pull request, served over HTTP."""

    def __init__(self, httpserver, base, head):
        self.server, self.artifacts = httpserver, {}
        self.comments, self.checks, self.issues = [], [], []
        self.posted_s = 0.0  # when something was last written, of the monotonic clock
        pull = {"number": 7, "base": {"sha": base}, "head": {"sha": head}}
        httpserver.expect_request("/repos/o/r/pulls").respond_with_json([pull])
        compared = httpserver.expect_request(f"/repos/o/r/compare/{base}...{head}")
        compared.respond_with_json({"merge_base_commit": {"sha": base}})
        for path, rows in (
            ("/repos/o/r/issues/7/comments", self.comments),
            ("/repos/o/r/check-runs", self.checks),
            ("/repos/o/r/issues", self.issues),
        ):
            self._serve_rows(path, rows)
        listing = "/repos/o/r/actions/runs/77/artifacts"
        httpserver.expect_request(listing).respond_with_json({"artifacts": [{"id": 5}]})
        archive = httpserver.expect_request("/repos/o/r/actions/artifacts/5/zip")
        archive.respond_with_handler(self._archive)

    @property
    def api_url(self):
        return self.server.url_for("").rstrip("/")

    def calls(self):
        """What was asked, in order."""
        return [f"{asked.method} {asked.path}" for asked, _ in self.server.log]

    def _serve_rows(self, path, rows):
        def create(request):
            self.posted_s = time.monotonic()
            number = len(rows) + 1
            made = {
                "id": number,
                "number": number,
                "state": "open",
                "user": {"login": BOT},
                "html_url": f"https://x/{number}",
            }
            rows.append(made | request.get_json())
            return Response(json.dumps(rows[-1]), 201, content_type="application/json")

        def page(_request):
            return Response(json.dumps(rows), content_type="application/json")

        self.server.expect_request(path, method="POST").respond_with_handler(create)
        self.server.expect_request(path, method="GET").respond_with_handler(page)

    def _archive(self, _request):
        (content,) = self.artifacts.values()
        return Response(content, content_type="application/zip")
