"""The check on a commit: its conclusion, its annotations, and how they reach GitHub."""

import pytest
from werkzeug import Response

from dashboard.check_run import LONGEST_SUMMARY, MOST_ANNOTATIONS, check_run
from dashboard.github import GitHub
from db.cases import Verdict
from db.gate import FAIL_ON, Policies, gate
from tests.comment_goldens import POLICIES, TODAY
from tests.compared import UNMEASURED, case, comparison

HEAD = "a" * 40
PATH = "/repos/o/r/check-runs"
GONE = UNMEASURED | {"base_value": 3e-3}


def judged(*cases, policies=None, is_gated=True):
    found = comparison(*cases)
    known = policies or Policies()
    gated = gate(found, FAIL_ON["confirmed"], known, TODAY, confirmed_only=True)
    return check_run(found, HEAD, "text", gated if is_gated else None)


@pytest.mark.parametrize(
    ("one", "conclusion", "level"),
    [
        (case(Verdict.REGRESSION, confirmed=True), "failure", "failure"),
        (case(Verdict.REGRESSION), "neutral", "warning"),
        (case(Verdict.FAILED, **GONE), "failure", "failure"),
        (case(Verdict.REMOVED, **GONE), "failure", "warning"),
        (case(Verdict.SKIPPED, **GONE), "failure", "warning"),
        (case(Verdict.SKIPPED, **UNMEASURED), "neutral", None),
        (case(Verdict.INCONCLUSIVE), "neutral", "warning"),
        (case(Verdict.NOT_ENOUGH_HISTORY), "neutral", None),
        (case(Verdict.NEW, **UNMEASURED), "neutral", None),
        (case(Verdict.IMPROVEMENT, confirmed=True), "success", None),
        (case(Verdict.NO_CHANGE), "success", None),
    ],
)
def test_each_verdict_has_its_conclusion_and_its_annotation(one, conclusion, level):
    found = judged(one)

    assert found.conclusion == conclusion
    assert [note["annotation_level"] for note in found.annotations] == ([level] if level else [])
    assert judged(one, is_gated=False).conclusion != "failure"


def test_what_somebody_answers_for_or_nobody_requires_fails_nothing():
    answered = case(Verdict.REGRESSION, confirmed=True)
    told = case(Verdict.REGRESSION, benchmark="peers.Peers.time_peer", confirmed=True)

    first, second = judged(answered, policies=POLICIES), judged(told, policies=POLICIES)

    assert (first.conclusion, second.conclusion) == ("success", "neutral")
    assert [note["annotation_level"] for note in first.annotations] == ["notice"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "<script>", "@octocat", "", "a\nb"])
def test_no_name_of_a_benchmark_becomes_a_path(name):
    found = judged(case(Verdict.REGRESSION, benchmark=name, machine="m\r\n::error::"))

    assert found.annotations == ()


def test_annotation_is_one_line_that_says_where_and_how_much():
    hostile = case(Verdict.REGRESSION, params="x=\n::error::", machine="m\r\n2", confirmed=True)

    (note,) = judged(hostile).annotations

    assert note["path"] == "benchmarks/step.py"
    assert note["title"] == "step.Step.time_step(x= ::error::)"
    assert note["message"] == "regression +12.5 % [+11.0 %, +14.0 %] on m 2"


def test_long_summary_is_cut_between_letters():
    cut = check_run(comparison(case(Verdict.NEW)), HEAD, "\N{EURO SIGN}" * 30_000, None).summary

    assert LONGEST_SUMMARY - 3 < len(cut.encode()) <= LONGEST_SUMMARY
    assert set(cut) == {"\N{EURO SIGN}"}


def test_annotations_go_in_calls_of_fifty_and_end_somewhere(httpserver):
    sent = []

    def answer(request):
        sent.append((request.method, request.get_json()))
        body = '{"id": 3, "html_url": "https://x/c"}'
        return Response(body, content_type="application/json")

    httpserver.expect_request(PATH, method="POST").respond_with_handler(answer)
    httpserver.expect_request(f"{PATH}/3", method="PATCH").respond_with_handler(answer)
    many = [case(Verdict.INCONCLUSIVE, params=f"n={number}") for number in range(600)]

    with GitHub("ghp_secret", httpserver.url_for("").rstrip("/")) as client:
        assert client.create_check("o/r", judged(*many)) == "https://x/c"

    assert [method for method, _ in sent] == ["POST"] + ["PATCH"] * 9
    counts = [len(said["output"]["annotations"]) for _, said in sent]
    assert (set(counts), sum(counts)) == ({50}, MOST_ANNOTATIONS)
    assert all({"title", "summary"} <= set(said["output"]) for _, said in sent)
