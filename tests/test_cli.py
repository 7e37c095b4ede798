"""The command: what it prints, where, and with which exit status."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashboard import cli_exit, forge_errors
from dashboard.cli import main
from dashboard.cli_exit import ExitCode
from dashboard.pr_comment import MARKER
from db import errors
from db.compare import Comparison, Verdict
from tests.asv_trees import GitRepository
from tests.command_on_tree import (
    BASE,
    BROKEN,
    SLOWER,
    THIN,
    add_run,
    add_window,
    command_on,
    empty_tree,
    one_line,
    small_tree,
    strict,
)


@pytest.fixture
def tree(tmp_path):
    return small_tree(tmp_path / "results")


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'bench.db'}"


@pytest.fixture
def call(url):
    return command_on(url)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A database file that holds the tree, made once by the command itself."""
    folder = tmp_path_factory.mktemp("stored")
    file = folder / "bench.db"
    result = command_on(f"sqlite:///{file}")("ingest", str(small_tree(folder / "results").root))
    assert result.exit_code == ExitCode.OK, result.output
    return file


@pytest.fixture
def filled(stored, tmp_path, call):
    """The command on a copy of that database."""
    shutil.copy(stored, tmp_path / "bench.db")
    return call


# --- exit statuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "head", "status"),
    [
        (BASE, BASE, ExitCode.OK),
        (SLOWER, BASE, ExitCode.OK),
        (BASE, SLOWER, ExitCode.REGRESSION),
        (BASE, BROKEN, ExitCode.FAILED),
        (BASE, THIN, ExitCode.INCONCLUSIVE),
    ],
)
def test_compare_ends_with_the_verdict_as_status(filled, base, head, status):
    result = filled("compare", base, head)

    assert result.exit_code == status, result.output
    assert result.stderr == ""


def test_every_verdict_has_an_exit_status():
    assert set(cli_exit.VERDICTS) == set(Verdict)


def test_comparison_of_nothing_means_missing_results():
    nothing = Comparison((), dict.fromkeys(Verdict, 0), Verdict.NOT_ENOUGH_HISTORY)

    assert cli_exit.exit_code(nothing) == ExitCode.FAILED


@pytest.mark.parametrize("root", [errors.DbError, forge_errors.ForgeError])
def test_every_typed_error_has_an_exit_status(root):
    def below(kind):
        return [kind, *(deeper for one in kind.__subclasses__() for deeper in below(one))]

    leaves = [kind for kind in below(root) if not kind.__subclasses__()]

    assert len(leaves) > 3
    assert all(issubclass(leaf, tuple(kind for kind, _ in cli_exit.ERRORS)) for leaf in leaves)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "1a", "2b"),
        ("diagnose",),
        ("detect",),
        ("comment", "--repo", "o/r", "--pr", "1", "--base", "1a", "--head", "2b", "--dry-run"),
        ("dashboard", "--headless"),
        ("db", "check"),
        ("ingest", ".", "--dry-run"),
    ],
)
def test_database_that_does_not_exist_is_refused_and_not_made(call, url, arguments):
    assert "found none" in one_line(call(*arguments))
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_unreadable_results_leave_no_database_behind(call, url, tmp_path):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "machine.json").write_text("{")

    assert one_line(call("ingest", str(tmp_path)))
    assert not list(tmp_path.glob("**/*.db*"))
    assert not Path(url.removeprefix("sqlite:///")).exists()


@pytest.mark.parametrize("bad", ["nonsense", "mysql://host/x", "sqlite://"])
def test_database_url_that_cannot_be_read_is_refused(bad):
    result = CliRunner().invoke(main, ["--db", bad, "db", "check"], prog_name="ddtree-bench")

    assert "database URL" in one_line(result)


def test_password_of_a_database_is_not_repeated():
    url = "postgresql://bench:s3cret@127.0.0.1:1/bench"

    result = CliRunner().invoke(main, ["--db", url, "db", "check"], prog_name="ddtree-bench")

    assert "s3cret" not in one_line(result)


@pytest.mark.parametrize("commit", ["ffff", "", "%", "1a2b3c4d" * 8])
def test_commit_that_is_not_stored_is_refused(filled, commit):
    assert "commit: expected one" in one_line(filled("compare", BASE, commit))


def test_commit_without_results_on_the_machine_means_missing_results(filled):
    result = filled("compare", BASE, SLOWER, "--machine", "elsewhere")

    assert "on machine elsewhere, found none" in one_line(result, ExitCode.FAILED)


def test_two_kinds_of_output_at_once_are_refused(filled):
    assert "got both" in one_line(filled("compare", BASE, SLOWER, "--json", "--markdown"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope",),
        ("--nope", "compare"),
        ("compare", BASE),
        ("compare", BASE, SLOWER, "--nope"),
        ("ingest",),
        ("dashboard", "--port", "0"),
        ("dashboard", "--port", "many"),
        ("dashboard", "--path", "/{name}"),
        ("comment", "--repo", "o/r", "--pr", "0", "--base", BASE, "--head", SLOWER),
        ("run", "--profile", "huge"),
        ("db", "nope"),
    ],
)
def test_usage_that_makes_no_sense_is_one_line(call, arguments):
    assert "--help)" in one_line(call(*arguments))


# --- ingest --------------------------------------------------------------------------------------


def test_second_ingest_stores_nothing_new(call, tree):
    first = strict(call("ingest", str(tree.root), "--json").stdout)
    second = strict(call("ingest", str(tree.root), "--json").stdout)

    assert first["new_results"] > 0
    assert second["new_results"] == 0
    assert second["values"] == first["values"]


def test_dry_run_of_ingest_stores_nothing(call, tree):
    call("db", "upgrade")

    assert call("ingest", str(tree.root), "--dry-run").exit_code == ExitCode.OK
    assert "commit: expected one" in one_line(call("compare", BASE, SLOWER))


@pytest.mark.parametrize("content", ["{", "", '{"version": 2}', "\x00\x01", "[]"])
def test_result_file_that_cannot_be_read_is_named_and_nothing_is_stored(call, tree, content):
    next(tree.root.glob(f"*/{BASE[:8]}*.json")).write_text(content)
    call("db", "upgrade")

    line = one_line(call("ingest", str(tree.root)))

    assert BASE[:8] in line
    assert "commit: expected one" in one_line(call("compare", SLOWER, BROKEN))


def test_path_without_results_is_refused(call, tmp_path):
    assert "nowhere" in one_line(call("ingest", str(tmp_path / "nowhere")))


def test_results_of_another_commits_code_are_refused_and_not_stored(call, tmp_path):
    repository = GitRepository(tmp_path / "repository")
    old, new = repository.commit("old"), repository.commit("new")
    tree = empty_tree(tmp_path / "results")
    add_run(tree, new, [0.010, 0.020], day=0)
    foreign = {"engine_tree": repository.engine_tree(old), "dirty": False}
    add_window(tree, new, 1024, time_s=0.010, day=0, provenance=foreign)
    add_window(tree, new, 2048, time_s=0.020, day=0, provenance=foreign)

    result = call("ingest", str(tree.root), "--repository", str(repository.root))

    assert result.exit_code == ExitCode.BAD_INPUT
    lines = result.stderr.splitlines()
    assert [line.split(" of ")[0] for line in lines] == [
        "ddtree-bench: refused: step.Step.time_step(context=1024)",
        "ddtree-bench: refused: step.Step.time_step(context=2048)",
    ]
    assert all("another commit's code ran" in line for line in lines)
    stored = call("compare", new, new)
    assert stored.exit_code in {ExitCode.BAD_INPUT, ExitCode.FAILED}


# --- reading commands ----------------------------------------------------------------------------


def test_compare_as_json_is_strict_and_alone_on_standard_output(filled):
    result = filled("compare", BASE[:6], SLOWER[:6], "--json")

    answer = strict(result.stdout)
    assert (answer["base"], answer["head"]) == (BASE, SLOWER)
    assert answer["verdict"] == "regression"
    assert {case["case"]: case["verdict"] for case in answer["cases"]} == {
        "step.Step.time_step(context=1024)": "no change",
        "step.Step.time_step(context=2048)": "regression",
    }


def test_compare_in_a_terminal_says_verdict_case_and_tier(filled):
    text = filled("compare", BASE, SLOWER).stdout

    assert text.startswith(
        "Regressed: 1 regression, 1 unchanged of 2 cases (1a1a1a1a1a → 2b2b2b2b2b)"
    )
    assert "step.Step.time_step(context=2048)" in text
    assert "+20.0 %" in text
    assert "screened, not confirmed" in text


def test_narrow_terminal_cuts_no_number(filled):
    text = filled("compare", BASE, BROKEN, COLUMNS="60").stdout

    assert all(piece in text for piece in ("10 ms", "20 ms", "contender", "8/8"))


def test_comparison_with_nothing_judged_does_not_speak_of_screening(filled):
    assert "screened" not in filled("compare", BASE, THIN).stdout


def test_compare_as_markdown_is_the_comment(filled):
    dry = ("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER, "--dry-run")

    markdown = filled("compare", BASE, SLOWER, "--markdown").stdout

    assert markdown.rstrip().endswith(MARKER)
    assert filled(*dry).stdout == markdown


def test_diagnosis_without_telemetry_means_missing_results(filled):
    assert "expected telemetry windows" in one_line(filled("diagnose"), ExitCode.FAILED)


def test_diagnosis_holds_each_case_against_its_floor(call, tree):
    add_window(tree, SLOWER, 1024, time_s=0.010, day=1)
    add_window(tree, SLOWER, 2048, time_s=0.024, day=1)
    stored = strict(call("ingest", str(tree.root), "--json").stdout)

    answer = strict(call("diagnose", "--json").stdout)

    assert (stored["windows_joined"], stored["windows_unjoined"]) == (2, 0)
    (diagnosis,) = answer["diagnoses"]
    ratios = {case["context_tokens"]: case["floor_ratio"] for case in diagnosis["cases"]}
    assert ratios == {1024: pytest.approx(9.77, abs=0.01), 2048: pytest.approx(11.72, abs=0.01)}
    text = call("diagnose", "step.Step").stdout
    assert "step.Step.time_step(context=2048)" in text
    assert "11.7\N{MULTIPLICATION SIGN}" in text


def test_diagnosis_of_an_unknown_series_or_commit_is_refused(filled):
    assert "series: expected" in one_line(filled("diagnose", "99999"))
    assert "commit: expected one" in one_line(filled("diagnose", "--commit", "ffff"))


def test_detection_finds_the_first_commit_of_a_new_level_once(call, tmp_path):
    tree = empty_tree(tmp_path / "results")
    for day in range(24):
        level = 0.010 if day < 12 else 0.012
        add_run(tree, f"{day:02x}" * 20, [level * (1 + day % 3 / 1000), 0.020], day=day)
    call("ingest", str(tree.root))

    first = strict(call("detect", "--json").stdout)
    second = strict(call("detect", "--json").stdout)

    assert (first["series"], first["change_points"], first["new"]) == (2, 1, 1)
    assert first["causes"] == {"unknown": 1}
    assert (second["change_points"], second["new"], second["gone"]) == (1, 0, 0)
    assert "1 change points in 2 series (1 unknown): 0 new, 0 gone" in call("detect").stdout


def test_detection_of_a_short_history_finds_nothing(filled):
    assert strict(filled("detect", "--json").stdout)["change_points"] == 0


def test_check_accepts_what_upgrade_made(call):
    assert call("db", "upgrade").exit_code == ExitCode.OK
    assert call("db", "check").exit_code == ExitCode.OK
