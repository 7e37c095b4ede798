"""The pull-request comment: golden texts, hostile names, and GitHub's limit."""

import html
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard import markdown, pr_comment
from dashboard.pr_comment import LIMIT_BYTES, MARKER, CommentContext, render
from dashboard.verdicts import headline
from db.compare import Comparison, Verdict
from tests.comment_goldens import FOLDER, GOLDENS, text_of
from tests.compared import REGRESSION, case, comparison

BASE = "b" * 40
HEAD = "a" * 40
CONTEXT = CommentContext(BASE, HEAD)


def text_between(text, start, end):
    return text.split(start, 1)[1].split(end, 1)[0]


@pytest.mark.parametrize("name", GOLDENS)
def test_comment_of_each_verdict_reads_as_its_file(name):
    """`python -m tests.comment_goldens` writes the files anew."""
    assert f"{text_of(name)}\n" == (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_there_is_no_file_of_a_verdict_that_nobody_renders():
    assert {path.stem for path in FOLDER.iterdir()} == set(GOLDENS)


@pytest.mark.parametrize("name", GOLDENS)
def test_every_comment_says_what_to_do_before_what_is_folded(name):
    text = text_of(name)

    assert text.index("**What to do**") < text.index("<details>")
    assert len(text_between(text, "**What to do**", "<details>").strip()) > 10
    # A summary is HTML, in which Markdown shows its marks.
    assert not re.search(r"<summary>[^<]*`", text)


def test_command_for_what_is_open_needs_no_stored_results():
    """A reader's checkout has none: whose results they are, the pull request's job threw away."""
    many = [case(Verdict.INCONCLUSIVE, benchmark=f"a.B.time_{name}") for name in "xy"]
    untimed = case(Verdict.INCONCLUSIVE, benchmark="a.B.track_z", unit="tokens/s")

    text = render(comparison(*many, untimed), CONTEXT)

    assert r"--profile full --bench '^(a\.B\.time_x|a\.B\.time_y)'" in text
    assert "ddtree-bench confirm" not in render(comparison(untimed), CONTEXT)


def test_quiet_pull_request_opens_no_table():
    steady = case(Verdict.NO_CHANGE, confirmed=True)

    text = render(comparison(steady, steady), CONTEXT)

    assert text.startswith("**No change: 2 unchanged of 2 cases** (")
    assert "Screened" not in text
    assert "WARNING" not in text
    assert text.index("<details>") < text.index("| case |")


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (Verdict.REGRESSION, "Regressed: 1 regression of 1 case"),
        (Verdict.IMPROVEMENT, "Improved: 1 improvement of 1 case"),
        (Verdict.NO_CHANGE, "No change: 1 unchanged of 1 case"),
        (Verdict.INCONCLUSIVE, "Inconclusive: 1 inconclusive of 1 case"),
        (Verdict.FAILED, "Failed: 1 failed of 1 case"),
        (Verdict.NOT_ENOUGH_HISTORY, "Not enough history: 1 without enough history of 1 case"),
        (Verdict.NEW, "Nothing to compare: 1 new of 1 case"),
        (Verdict.REMOVED, "Cases are missing: 1 removed of 1 case"),
        (Verdict.SKIPPED, "Nothing was measured: 1 skipped of 1 case"),
    ],
)
def test_each_verdict_has_its_line(verdict, line):
    assert headline(comparison(case(verdict))) == line


def test_counts_have_their_thousands():
    many = [case(Verdict.REMOVED), case(Verdict.NO_CHANGE)] * 1000

    assert headline(comparison(*many)) == (
        "Cases are missing: 1,000 removed, 1,000 unchanged of 2,000 cases"
    )


def test_comparison_without_cases_says_so():
    empty = Comparison((), dict.fromkeys(Verdict, 0), Verdict.NOT_ENOUGH_HISTORY)

    assert render(empty, CONTEXT).startswith("**Not enough history: no cases**")


def test_every_verdict_is_shown_somewhere():
    cases = [case(verdict, benchmark=f"b.{verdict.name}") for verdict in Verdict]

    text = render(comparison(*cases), CONTEXT)

    assert all(f"b.{verdict.name}" in html.unescape(text) for verdict in Verdict)


def test_machine_is_a_column_only_where_there_are_several():
    other = case(Verdict.REGRESSION, machine="h200")

    assert "machine |" not in render(comparison(REGRESSION), CONTEXT)
    assert "| `h200` |" in render(comparison(REGRESSION, other), CONTEXT)


def test_open_table_is_short_and_its_rest_is_folded():
    cases = [case(Verdict.REGRESSION, benchmark=f"b{number:02}") for number in range(40)]

    text = render(comparison(*cases), CONTEXT)

    opened, folded = text.split("<details><summary>25 further regressions</summary>")
    assert opened.count("\n| `b") == pr_comment.OPEN_ROWS
    assert folded.count("\n| `b") == 25


def test_value_of_zero_at_base_is_written_with_its_unit():
    zero = case(
        Verdict.REGRESSION, base_value=0.0, head_value=2.0, unit="bytes", relative_change=None
    )

    assert "| 0 B → 2 B | \N{EN DASH} |" in render(comparison(zero), CONTEXT)


HOSTILE = [
    "a|b",
    "back`tick",
    "```\n# title",
    "@octocat",
    "#1234",
    "<img src=x onerror=alert(1)>",
    "<!-- ddtree-bench:suite -->",
    "</details>",
    "[link](http://evil.example)",
    "![x](http://evil.example/x.png)",
    "http://evil.example",
    "www.evil.example",
    "mail@evil.example",
    "line\nbreak\r\n| --- |",
    "back\\|slash",
    "*bold* _it_ ~~no~~",
    "&lt;b&gt;",
    "\u202eright to left",
    "\x00\x07",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", ["benchmark", "params", "machine", "unit", "reason"])
def test_hostile_text_stays_one_cell_without_markup(text, field):
    def outside(value):
        slower = case(Verdict.REGRESSION, confirmed=True, **{field: value})
        doubtful = case(Verdict.INCONCLUSIVE, **{field: value})
        other = case(Verdict.INCONCLUSIVE, machine="second")
        got = render(comparison(slower, doubtful, other), CONTEXT)
        return re.sub(r"(`{3,})(sh|toml)\n.*?\n\1\n|`[^`\n]*`", "", got, flags=re.DOTALL)

    expected, outside_code = outside("plain"), outside(text)

    assert outside_code.count("\n") == expected.count("\n")
    assert outside_code.count("|") == expected.count("|")
    assert outside_code.count(MARKER) == 1
    assert outside_code.count("<details>") == outside_code.count("</details>")
    assert "`" not in outside_code
    assert not re.search(r"<(?!/?(details|summary|code)>|!-- ddtree)", outside_code)
    assert not re.search(r"://|www\.|\]\(|[*~]{2}no", outside_code)
    assert not re.search(r"@\w|#\w", html.unescape(outside_code))


@given(st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_name_is_code_that_nothing_can_leave(text):
    shown = markdown.code(text)

    if shown.startswith("`"):
        assert re.fullmatch(r"`[^`|\\<>&@\n\r]+`", shown)
    elif shown != markdown.MISSING:
        inner = shown.removeprefix("<code>").removesuffix("</code>")
        assert re.fullmatch(r"(?:[^`|\\<>@&\n\r]|&#\d+;)+", inner)


@given(st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_escaped_text_reads_the_same_once_parsed(text):
    shown = html.unescape(markdown.escape(text)).replace("\u200b", "")

    assert shown == markdown.one_line(text).replace("\u200b", "")


def test_longest_comment_stays_under_the_limit_and_counts_what_is_left_out():
    name = "@|`<&" * 100
    cases = [
        case(verdict, benchmark=f"{name[:200]}{number}", reason=name)
        for verdict in Verdict
        for number in range(50)
    ]

    text = render(comparison(*cases), CONTEXT)

    assert LIMIT_BYTES * 0.9 < len(text.encode()) <= LIMIT_BYTES
    note = text_between(text, "Left out, for GitHub's limit on a comment: ", ".\n")
    shown = len(re.findall(r"^\| <code>", text, flags=re.MULTILINE))
    assert shown + sum(map(int, re.findall(r"\d+", note))) == len(cases)
    assert text.endswith(MARKER)
    assert text.count("<details>") == text.count("</details>")


def test_many_quiet_cases_cost_the_regression_nothing():
    steady = [case(Verdict.NO_CHANGE, benchmark=f"quiet{number}") for number in range(2000)]

    text = render(comparison(REGRESSION, *steady), CONTEXT)

    assert len(text.encode()) <= LIMIT_BYTES
    assert text.index("time_step") < text.index("quiet0")
    assert re.search(r"Left out, for GitHub's limit on a comment: [\d,]+ unchanged\.", text)


def test_changes_that_were_measured_again_are_called_confirmed_and_others_are_not():
    done = case(Verdict.REGRESSION, confirmed=True)
    quiet = case(Verdict.NO_CHANGE)

    assert "Confirmed: both commits" in render(comparison(done, quiet), CONTEXT)
    assert "Confirmed" not in render(comparison(done, case(Verdict.IMPROVEMENT)), CONTEXT)
    assert "Confirmed" not in render(comparison(quiet), CONTEXT)
    refuted = render(comparison(case(Verdict.NO_CHANGE, confirmed=True)), CONTEXT)
    assert "Nothing is confirmed: what one pass flagged was measured again" in refuted


@pytest.mark.parametrize("text", ["plain", *HOSTILE])
def test_link_leads_to_the_dashboard_whatever_the_case_is_called(text):
    context = CommentContext(BASE, HEAD, dashboard="https://bench.example.org/")

    hostile = case(Verdict.REGRESSION, benchmark=text, machine=text)

    got = render(comparison(hostile, REGRESSION), context)
    # A code span binds tighter than a link around it: what is in it is no markup.
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"`[^`\n]*`", "code", got))
    assert len(links) == 2
    for link in links:
        assert re.fullmatch(
            r"https://bench\.example\.org/history\?benchmark=[\w.%~-]+&machine=[\w.%~-]+"
            r"&p\.context=1024&p\.page_size=16",
            link,
        )
    plain = case(Verdict.REGRESSION, benchmark="plain", machine="plain")
    assert got.count("\n") == render(comparison(plain, REGRESSION), context).count("\n")


def test_same_comparison_gives_the_same_text():
    cases = comparison(REGRESSION, case(Verdict.NEW))

    assert render(cases, CONTEXT) == render(cases, CONTEXT)
