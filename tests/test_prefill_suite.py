"""A prompt is read anew for each sample, whole or a chunk behind rows that nobody computed."""

import pytest
import torch

from benchmarks.prefill import CHUNK_TOKENS, Prefill, RankChunk
from tests.ranks import SMALL


class SmallChunk(RankChunk):
    version = "1"
    rank = SMALL
    dtype = torch.float32
    moe_backend = "reference"


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    for module in ("_suite", "prefill"):
        monkeypatch.setattr(f"benchmarks.{module}.DEVICE", "cpu")


def test_a_chunk_is_committed_behind_the_same_rows_each_time():
    suite = SmallChunk()
    suite.build(100, 16, "reference")
    cache, (seq,) = suite.batch.cache, suite.batch.seqs
    rows = []
    for _ in range(2):
        suite.reset()
        assert cache.length(seq) == 100
        suite.time_chunk(100, 16, "reference")
        assert cache.length(seq) == 100 + CHUNK_TOKENS
        rows.append(cache.pages[:, cache.page_table((seq,))[0].long()].clone())
    facts = suite.facts()

    assert torch.equal(rows[0], rows[1])
    assert len(set(suite.tokens)) > 0.5 * SMALL.target.vocab_size  # equal ones choose alike
    assert facts.context_tokens == 100
    assert facts.bytes > facts.kv_bytes > 0
    assert facts.flops > 2 * CHUNK_TOKENS * 64 * 64


def test_a_prompt_is_read_whole_and_leaves_no_page_behind():
    suite = Prefill()
    suite.build(200, 16, "reference")
    for _ in range(3):
        suite.reset()
        suite.time_prefill(200, 16, "reference")
    batch = suite.engine.prefill([suite.prompt])

    assert batch.cache.length(batch.seqs[0]) == 199
    assert suite.facts().flops > 0
