"""What a diagnosis makes of telemetry windows that something spoiled, from the sidecar on."""

import pytest
from sqlalchemy.orm import Session

from db import queries
from db.counters import DOUBTS
from db.diagnose import diagnose
from db.evidence import Status
from db.ingest import ingest
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row
from tests.recordings import claim_of, names

STARVED = {
    "utilization_gpu_pct": 100.0,
    "utilization_memory_pct": 0.0,
    "power_w": 131.0,
    "gpm_sm_active_pct": 5.4,
    "gpm_dram_bandwidth_pct": 0.2,
    "sm_clock_mhz": 1980.0,
    "clock_event_reasons": 0.0,
}
ABOUT_WORK = {"gpu_utilization_misleads", "dram_idle", "starvation"}
SHARED = ("other_process",)


@pytest.fixture
def evidence_of(engine, tmp_path, monkeypatch):
    """Ingest one process of a case for each window; return what they are as evidence."""
    monkeypatch.chdir(tmp_path)
    tree = AsvTree(tmp_path / "results").benchmark()
    tree.results({BENCHMARK: row(0.01)})

    def evidence_of(*windows):
        for number, (validity, counters) in enumerate(windows):
            tree.line(
                pid=number + 1,
                started_at=START_S + number,
                device={"kind": "cuda", "name": "NVIDIA H200", "num_sms": 132},
                validity=list(validity),
                counters={
                    name: {"median": value, "min": value, "max": value, "n": 20, "unit": "%"}
                    for name, value in counters.items()
                },
            )
        ingest(engine, [tree.root])
        with Session(engine) as session:
            (found,) = queries.evidence(session)
        return found

    return evidence_of


def test_a_sound_window_supports_its_claims(evidence_of):
    claims = diagnose(evidence_of(((), STARVED))).claims

    assert names(claims) >= ABOUT_WORK
    assert "window_doubted" not in names(claims)


@pytest.mark.parametrize("code", DOUBTS)
def test_a_doubted_window_supports_no_claim_but_the_doubt(evidence_of, code):
    found = diagnose(evidence_of(((code,), STARVED)))
    claim = claim_of(found, "window_doubted")

    assert names(found.claims).isdisjoint(ABOUT_WORK)
    assert found.cases[0].bound is None
    assert (claim.status, claim.is_alarm) == (Status.UNTESTED, False)
    assert (code in claim.evidence, DOUBTS[code] in claim.statement) == (True, True)


def test_a_clock_that_was_held_down_is_told_from_a_doubted_window(evidence_of):
    capped = STARVED | {"sm_clock_mhz": 1485.0, "clock_event_reasons": 4.0}

    claim = claim_of(diagnose(evidence_of((("throttled", "clock_moved"), capped))), "clock_capped")

    assert (claim.value, claim.evidence) == (1485.0, "clocks event reasons 0x4")


def test_a_process_that_did_not_watch_takes_nothing_from_one_that_did(evidence_of):
    watched, told = evidence_of(((), STARVED), (("no_window",), {})), {"no_window"}

    assert told.isdisjoint(watched.points[0].validity)
    assert names(diagnose(watched).claims) >= ABOUT_WORK


def test_a_sound_window_of_the_case_is_enough(evidence_of):
    busy = STARVED | {"gpm_sm_active_pct": 90.0}
    found = evidence_of((SHARED, busy), (("interleaved",), STARVED), (SHARED, busy))
    (point,) = found.points

    assert (point.counters["gpm_sm_active_pct"], point.validity) == (5.4, ("interleaved",))
    assert "window_doubted" not in names(diagnose(found).claims)


def test_a_window_without_counters_clears_no_doubt(evidence_of):
    found = evidence_of((SHARED, STARVED), (("no_nvml",), {}))

    assert claim_of(diagnose(found), "window_doubted").evidence.startswith(
        "validity codes other_process"
    )


def test_a_counter_lost_within_the_window_is_no_counter_of_it(evidence_of):
    (point,) = evidence_of((("counter_interrupted:power_w",), STARVED)).points

    assert set(point.counters) == set(STARVED) - {"power_w"}


def test_reasons_of_several_windows_are_joined_never_averaged(evidence_of):
    held = STARVED | {"clock_event_reasons": 8.0}
    (point,) = evidence_of(((), STARVED), (("throttled",), held)).points

    assert point.counters["clock_event_reasons"] == 8.0
