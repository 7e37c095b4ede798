"""A draft behind a context is the same however its rows came to be there, and costs what they are."""

import pytest
import torch

from benchmarks._regimes import PROFILES, drafter_axes
from benchmarks.drafter import REQUEST, Draft
from engine import preset


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setattr("benchmarks.drafter.DEVICE", "cpu")


def built(context_rows, drafter_context):
    suite = Draft()
    suite.build(300, context_rows, drafter_context)
    suite.time_draft(300, context_rows, drafter_context)
    return suite


@pytest.mark.parametrize("drafter_context", [0, 64])
def test_rows_that_are_kept_and_rows_made_anew_give_the_same_draft(drafter_context):
    kept, anew = built("cached", drafter_context), built("recomputed", drafter_context)

    first = kept.drafter.draft(kept.kept, REQUEST)
    assert torch.equal(first, kept.drafter.draft(kept.kept, REQUEST))
    assert torch.equal(first, anew.drafter.draft(anew.filled(), REQUEST))
    assert (kept.kept is None, anew.kept is None) == (False, True)


def test_a_drafter_that_sees_less_reads_less():
    everything, few = built("cached", 0).facts(), built("cached", 64).facts()

    assert everything.context_tokens == few.context_tokens == 300
    assert everything.kv_bytes > few.kv_bytes > 0
    assert everything.bytes > few.bytes > few.kv_bytes


def test_full_goes_beyond_the_window_and_only_full_goes_anywhere():
    window = preset("tiny").drafter.config.sliding_window
    for device in ("cpu", "cuda"):
        contexts = drafter_axes(PROFILES["full"], device).context_tokens
        assert min(contexts) <= window < max(contexts)
        assert drafter_axes(PROFILES["quick"], device).context_tokens == []
