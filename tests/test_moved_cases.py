"""Cases of a comparison that moved together are one finding with its likely cause class."""

from dataclasses import replace

from db.compare import compare
from db.moved_cases import findings
from tests.case_results import case, named, processes

NAMES = ("step.Step.time_step", "tree.Build.time_build", "attention.Cold.time_cold", "moe.time_moe")


def called(index):
    return named(NAMES[index], case()).key.name


def compared(levels, **changes):
    base = [named(name, case(processes(i))) for i, name in enumerate(NAMES)]
    head = [
        replace(named(name, case(processes(9 + i, level=level))), **changes)
        for i, (name, level) in enumerate(zip(NAMES, levels, strict=True))
    ]
    base = [replace(one, environment="driver 1") for one in base] if changes else base
    return findings(compare(base, head))


def test_cases_of_one_ratio_are_one_finding_and_others_their_own():
    found = compared((1.10, 1.11, 1.60, 1.0))

    assert [(one.cases, one.cause) for one in found] == [
        ((called(1), called(0)), "code"),
        ((called(2),), "code"),
    ]
    assert round(found[0].relative_change, 1) == 0.1


def test_up_and_down_are_not_together():
    assert [one.verdict for one in compared((1.1, 0.9, 1.0, 1.0))] == ["improvement", "regression"]


def test_a_machine_of_which_everything_moved_is_the_hardware():
    (found,) = compared((1.10, 1.11, 1.09, 1.10))

    assert (found.cause, len(found.cases)) == ("hardware", 4)
    assert found.to_dict()["machine"] == "h200"


def test_cases_under_another_environment_are_the_environments():
    (found,) = compared((1.10, 1.11, 1.09, 1.10), environment="driver 2")

    assert found.cause == "environment"


def test_nothing_flagged_is_no_finding():
    assert compared((1.0, 1.0, 1.0, 1.0)) == []
