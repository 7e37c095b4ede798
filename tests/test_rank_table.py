"""The tables of a rank's step and experts: every line on a CPU, at sizes that fit one."""

import re

import pytest
import torch

from benchmarks import _moe_table, _rank_table
from benchmarks._ceilings import Ceilings
from benchmarks._rank_table import Layout, Planted, check, floor_s, memory, rows
from benchmarks.moe import rank_layer
from engine.errors import ShapeError
from engine.kernels import Cost
from engine.presets import random_rank
from tests.ranks import SMALL

CEILINGS = Ceilings(1e9, 1e12, "measured", "bfloat16")
LAYOUT = Layout(
    page_size=16, cache_layout="paged", commit_length=8, moe_backend="reference", num_steps=2,
    graphs="buffers", prefill_chunk=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    for module in ("_ceilings", "_moe_table", "_rank_table", "_step_case", "moe"):
        monkeypatch.setattr(f"benchmarks.{module}.DEVICE", "cpu")
    for module in ("_moe_table", "_rank_table"):
        monkeypatch.setattr(f"benchmarks.{module}.measure_ceilings", lambda: CEILINGS)


@pytest.fixture(scope="module")
def models():
    return random_rank(SMALL, device="cpu", dtype=torch.bfloat16, seed=0)


def test_a_floor_is_the_slower_of_reading_and_multiplying():
    assert floor_s(Cost(bytes=2000, flops=10), CEILINGS) == 2e-6
    assert floor_s(Cost(bytes=2, flops=4_000_000), CEILINGS) == 4e-6


def test_every_context_and_backend_has_its_step_beside_its_stages(models):
    title, *lines = rows(models, [64, 100], ["reference"], LAYOUT)

    assert title.split()[:2] == ["context", "backend"]
    steps, chunks, asked = lines[::3], lines[1::3], lines[2::3]
    assert all(" prefill: 16 tokens in " in line for line in chunks)
    assert [line.split()[:2] for line in steps] == [["64", "reference"], ["100", "reference"]]
    for line in steps:
        step_ms, floor_ms, times = map(float, line.split()[2:5])
        stages = [tuple(map(float, pair.split("/"))) for pair in re.split(" +", line)[-4:]]
        assert times == pytest.approx(step_ms / floor_ms, rel=0.05)
        assert sum(floor for _, floor in stages) == pytest.approx(floor_ms, abs=2e-3)
    assert all(line.strip().startswith("commits 8, 0 launches") for line in asked)


def test_a_step_whose_numbers_are_none_is_refused(models):
    planted = Planted.of(models, 64, "reference", LAYOUT)
    check(planted)
    planted.batch.cache.pages[1, :, :, 0] = torch.inf

    with pytest.raises(ShapeError, match="logits: expected a finite maximum"):
        check(planted)


def test_memory_is_what_was_counted(models):
    line = memory(models, 100_000, LAYOUT)

    total = float(re.search(r"; ([0-9.]+) GB with 100000 tokens", line)[1])
    assert total == pytest.approx(3 * 48 * 2 * 100_000 / 1e9, abs=0.02)


def test_the_table_of_experts_has_a_line_for_each_number_of_tokens():
    lines = _moe_table.table(rank_layer(SMALL.target, "cpu"), [1, 9], "reference", 2)

    cells = [line.split() for line in lines[1:]]
    assert [cell[:2] for cell in cells] == [["1", "4"], ["9", cells[1][1]]]
    assert 4 < int(cells[1][1]) <= 16
    for cell in cells:
        layer_us, token_us = float(cell[3]), float(cell[9])
        assert token_us == pytest.approx(layer_us / int(cell[0]), abs=0.07)  # both are rounded


@pytest.mark.parametrize("named", [[], ["kimi-k2.6-tp8-rank"]])
def test_a_rank_is_drawn_and_its_table_printed(named, capsys, monkeypatch):
    monkeypatch.setitem(_rank_table.RANKS, "kimi-k2.6-tp8-rank", SMALL)
    options = ["--backends", "reference", "--moe-backend", "reference", "--steps", "2"]

    _rank_table.main([*named, "--contexts", "64", *options, "--prefill-chunk", "0"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kimi-k2.6-tp8-rank: drawn in ")
    assert lines[1].startswith("weights 0.00 GB counted")
    assert [line.split()[:2] for line in lines[2:4]] == [
        ["context", "backend"],
        ["64", "reference"],
    ]


def test_only_ranks_have_such_a_table(capsys):
    with pytest.raises(SystemExit):
        _rank_table.main(["tiny"])

    assert "presets: expected some of kimi-k2.6-tp8-rank," in capsys.readouterr().err
