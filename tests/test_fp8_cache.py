"""The engine over a cache of fp8 rows: what is generated depends on the cache and on nothing else.

Its oracle cannot be the target's plain forward, which keeps no rows; it is the engine itself
without drafts, one token a step, over a cache of the same kind.
"""

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.cost import latent_bytes, resident_bytes
from engine.decoder import Engine
from engine.errors import ConfigError
from engine.kernels import dequantize_rows, fp8_row_bytes
from engine.presets import preset
from engine.tree_scratch import fill_value
from tests.steered import Steered, random_logits

NEW_TOKENS = 24
PROMPTS = [[5, 3, 8, 1, 9, 2, 2, 7], [11], [n * n % 21 for n in range(37)]]


def generated(models, drafter, **options):
    config = EngineConfig(
        kv_dtype="fp8", node_budget=9, prefill_chunk=8, max_context=128, **options
    )
    engine = Engine(models.target, drafter, config, page_fill=torch.nan)
    return engine, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, seed=3)


@pytest.fixture(scope="module")
def models():
    return preset("nano", dtype=torch.float64, seed=1)


@pytest.fixture(scope="module")
def alone(models):
    _, generations = generated(models, None, mode="ar")
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16},
        {"page_size": 64, "cache_layout": "hybrid"},
        {"page_size": 16, "mode": "dflash"},
        {"page_size": 16, "prefix_reuse": True},
        {"page_size": 16, "graphs": "buffers"},
        {"page_size": 16, "tree_backend": "reference"},
        {"page_size": 16, "tree_backend": "reference", "cache_layout": "hybrid"},
    ],
    ids=str,
)
def test_greedy_output_with_drafts_is_that_without(models, alone, options):
    engine, generations = generated(models, models.drafter, **options)

    assert [generation.token_ids for generation in generations] == alone
    engine.cache.check_integrity()


def test_greedy_output_with_senseless_drafts_is_that_without(models, alone):
    _, generations = generated(models, Steered(models.drafter, random_logits), page_size=16)

    assert [generation.token_ids for generation in generations] == alone


def test_committed_rows_are_bytes_and_nothing_else_was_read(models):
    engine, _ = generated(models, models.drafter, page_size=16)
    batch = engine.prefill(PROMPTS)
    sizes = models.target.config

    rows = engine.cache.gather(0, batch.seqs[2])

    width = fp8_row_bytes(sizes.kv_lora_rank, sizes.qk_rope_head_dim)
    assert rows.shape == (len(PROMPTS[2]) - 1, width)
    assert rows.dtype == torch.uint8
    assert dequantize_rows(rows, sizes.kv_lora_rank).isfinite().all()
    engine.step(batch)
    batch.keep([])


def test_rows_in_fp8_are_within_a_few_percent_of_the_targets(models):
    def first_rows(kv_dtype):
        config = EngineConfig(mode="ar", kv_dtype=kv_dtype, max_context=64)
        engine = Engine(models.target, None, config)
        batch = engine.prefill([PROMPTS[2]])
        return engine.cache.gather(0, batch.seqs[0])

    plain = first_rows("target")
    coded = dequantize_rows(first_rows("fp8"), models.target.config.kv_lora_rank, torch.float64)

    assert 0 < ((coded - plain).norm() / plain.norm()).item() < 0.04


def test_unwritten_bytes_are_no_number_in_any_part_of_a_row():
    row = torch.full((fp8_row_bytes(16, 4),), fill_value(torch.nan, torch.uint8), dtype=torch.uint8)

    assert dequantize_rows(row, 16).isnan().all()
    assert fill_value(None, torch.uint8) == 0


def test_an_unknown_kv_dtype_is_refused():
    with pytest.raises(ConfigError, match="kv_dtype: expected one of target, fp8, got 'int8'"):
        EngineConfig(kv_dtype="int8")


def test_memory_counts_the_bytes_of_fp8_rows(models):
    config = EngineConfig(cache_layout="hybrid", max_context=128)
    plain, coded = (
        resident_bytes(models.target, models.drafter, replace(config, kv_dtype=kv_dtype))
        for kv_dtype in ("target", "fp8")
    )
    sizes = models.target.config

    row = fp8_row_bytes(sizes.kv_lora_rank, sizes.qk_rope_head_dim)
    for name in ("latent_pages", "tree_scratch"):
        assert getattr(coded, name) * 8 * sizes.latent_dim == getattr(plain, name) * row
    assert latent_bytes(sizes, 7, itemsize=8, kv_dtype="fp8") == 7 * sizes.num_hidden_layers * (
        fp8_row_bytes(sizes.kv_lora_rank, sizes.qk_rope_head_dim)
    )
