"""The tables of a rank's step and experts: every line on a CPU, at sizes that fit one."""

import json
import re
from dataclasses import replace

import pytest
import torch

from benchmarks import _moe_table, _rank_table
from benchmarks._ceilings import Ceilings
from benchmarks._device_work import DeviceWork, KernelTime, covered, device_work
from benchmarks._rank_table import Layout, Planted, check, floor_s, memory, row, title
from benchmarks._timing import captured
from benchmarks.moe import rank_layer
from engine import STAGES, StepShape, stage_costs
from engine.errors import ShapeError
from engine.kernels import Cost
from engine.moe import chosen_experts
from engine.presets import random_rank
from tests.ranks import SMALL

CEILINGS = Ceilings(1e9, 1e12, "measured", "bfloat16")
LAYOUT = Layout(
    page_size=16, cache_layout="paged", commit_length=8, moe_backend="reference", num_steps=2,
    graphs="buffers", tree_backend="reference", prefill_chunk=16, most_kernels=0,
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


def test_a_row_has_its_step_beside_its_stages(models):
    step, experts, chunk = row(models, 100, "reference", LAYOUT, CEILINGS).lines()

    assert title().split()[:2] == ["context", "backend"]
    assert " prefill: 16 tokens in " in chunk
    assert re.search(
        r"experts of a layer: \d+\.\d hit \(\d+ to \d+\), \d+\.\d if rows chose independently",
        experts,
    )
    assert step.split()[:2] == ["100", "reference"]
    step_ms, floor_ms, times = map(float, step.split()[2:5])
    stages = [tuple(map(float, pair.split("/"))) for pair in re.split(" +", step)[-4:]]
    assert times == pytest.approx(step_ms / floor_ms, rel=0.05)
    assert sum(floor for _, floor in stages) == pytest.approx(floor_ms, abs=2e-3)


def test_a_floor_holds_the_experts_that_the_rows_of_the_step_chose(models):
    planted = Planted.of(models, 64, "reference", replace(LAYOUT, graphs="off"))
    with chosen_experts() as chosen:
        planted.step()
    hits = [len(set(ids.flatten().tolist())) for ids in chosen]
    fewer = replace(LAYOUT, prefill_chunk=0)

    measured = row(models, 64, "reference", fewer, CEILINGS)

    config = models.target.config
    assert len(hits) == config.num_hidden_layers - config.first_k_dense_replace
    assert {len(ids) for ids in chosen} == {9}
    assert list(measured.experts_by_layer) == hits
    assert measured.experts_hit == pytest.approx(sum(hits) / len(hits))
    assert measured.experts_hit < measured.experts_expected
    shape = StepShape(64, 9, itemsize=2)
    costs = stage_costs(models.target, models.drafter, shape, experts_hit=measured.experts_hit)
    assert measured.floors_s["verify"] == floor_s(costs["verify"], CEILINGS)
    assert costs["verify"].bytes < stage_costs(models.target, models.drafter, shape)["verify"].bytes


def test_a_row_tells_what_was_asked_of_a_device(models):
    measured = replace(
        row(models, 64, "reference", replace(LAYOUT, prefill_chunk=0), CEILINGS),
        step_times_s=(0.003, 0.001, 0.002),
    )

    asked, slowest = measured.work_lines(
        DeviceWork(5, 2, 3, 1, 90, 0.0015, (KernelTime("gemm", 7, 0.001),))
    )

    assert asked.split("commits 8, ")[1] == (
        "5 launches of 90 kernels, 2 waits, 3 copies up, 1 back, busy 1.500 ms, 75 %"
    )
    assert slowest.split() == ["1000.0", "us", "in", "7", "x", "gemm"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_launches_waits_and_copies_of_a_body_are_counted():
    numbers = torch.ones(1000, device="cuda")
    replay = captured(lambda: numbers.mul(2.0).add(1.0))

    def body():
        numbers.sin_()
        replay()
        float(numbers.cos()[0])

    work = device_work(body, own_waits=0, most_kernels=2)

    assert (work.launches, work.copies_up, work.copies_back) == (3, 0, 1)
    assert work.kernels == 4
    assert work.waits >= 1
    assert 0.0 < work.slowest[-1].seconds <= work.slowest[0].seconds <= work.busy_s


def test_what_overlaps_is_busy_once():
    assert covered([]) == 0.0
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (5.5, 6.0)]) == 5.0


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


def test_the_table_of_experts_has_a_line_for_each_number_of_tokens(tmp_path, capsys):
    kept = tmp_path / "moe.json"
    small = rank_layer(SMALL.target, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_moe_table, "rank_layer", lambda *_: small)
        asked = ["--tokens", "1", "9", "--rounds", "2", "--json", str(kept)]
        assert _moe_table.main(asked) == 0

    cells = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [cell[:3] for cell in cells] == [
        ["1", "reference", "4"], ["9", "reference", cells[1][2]]
    ]  # fmt: skip
    assert 4 < int(cells[1][2]) <= 16
    for cell in cells:
        layer_us, token_us = float(cell[4]), float(cell[10])
        assert token_us == pytest.approx(layer_us / int(cell[0]), abs=0.07)  # both are rounded
    facts = json.loads(kept.read_text())
    assert [(row["num_tokens"], row["num_hit"]) for row in facts["rows"]] == [
        (1, 4), (9, int(cells[1][2]))
    ]  # fmt: skip


def test_a_rank_is_drawn_and_its_table_printed_and_kept(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(_rank_table.RANKS, "kimi-k2.6-tp8-rank", SMALL)
    file = tmp_path / "rank.json"
    backends = ["--backends", "triton_split", "reference", "--moe-backend", "reference"]
    options = ["--steps", "2", "--prefill-chunk", "48", "--fill", "100", "--json", str(file)]

    _rank_table.main(["--contexts", "64", *backends, *options])  # the whole rank, unless named

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kimi-k2.6-tp8-rank: drawn in ")
    assert lines[1].startswith("weights 0.00 GB counted")
    assert lines[2] == title()
    # No GPU: a row that cannot be, and the next one all the same.
    assert lines[3].split()[:4] == ["64", "triton_split", "failed:", "BackendError:"]
    assert lines[4].split()[:2] == ["64", "reference"]
    assert lines[7].split()[:4] == ["100", "reference", "filled", "in"]
    assert " by chunks of 48, " in lines[7]
    kept = json.loads(file.read_text())
    failed, measured = kept["rows"]
    assert failed["error"].startswith("BackendError: ")
    assert (measured["context"], measured["backend"]) == (64, "reference")
    assert measured["step_s"] == pytest.approx(sum(measured["step_times_s"]) / 2)
    assert set(measured["stages_s"]) == set(measured["floors_s"]) == set(STAGES)
    assert kept["layout"]["num_steps"] == 2
    assert [(one["num_tokens"], one["seconds"] > 0.0) for one in kept["fills"]] == [(100, True)]
    assert kept["ceilings"]["read_bytes_per_s"] == 1e9


def test_a_prompt_is_not_filled_in_no_chunks(capsys):
    with pytest.raises(SystemExit):
        _rank_table.main(["--fill", "100", "--prefill-chunk", "0"])

    assert "fill: expected a prefill chunk of at least 1, got 0" in capsys.readouterr().err


def test_a_rank_is_drawn_by_its_name(capsys, monkeypatch):
    monkeypatch.setitem(_rank_table.RANKS, "kimi-k2.6-tp8-rank-4-layers", SMALL)

    _rank_table.main(["kimi-k2.6-tp8-rank-4-layers", "--backends", "cuda_mma", "--contexts", "64"])

    drawn, *_, failed = capsys.readouterr().out.splitlines()
    assert drawn.startswith("kimi-k2.6-tp8-rank-4-layers: drawn in ")
    assert failed.split()[:3] == ["64", "cuda_mma", "failed:"]


def test_a_backend_that_is_none_is_refused_before_weights_are_drawn(capsys):
    with pytest.raises(SystemExit):
        _rank_table.main(["--backends", "none"])

    said = capsys.readouterr()
    assert said.err.endswith("reference, triton_serial, triton_split, cuda, cuda_mma, got 'none'\n")
    assert said.out == ""


def test_only_ranks_have_such_a_table(capsys):
    with pytest.raises(SystemExit):
        _rank_table.main(["tiny"])

    assert "presets: expected some of kimi-k2.6-tp8-rank," in capsys.readouterr().err
