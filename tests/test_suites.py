"""Suites are declarations: one identity in every profile, one sidecar line for each process."""

import argparse
import importlib
import json
import math
import os
import pkgutil
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import asv.benchmark
import asv.benchmarks
import pytest
import torch

import benchmarks
from benchmarks import _sidecar
from benchmarks._identity import SuiteError
from benchmarks._interleaved import _InterleavedSuite
from benchmarks._regimes import (
    PROFILES,
    UnknownProfileError,
    attention_axes,
    chunk_axes,
    cut_step_axes,
    generation_axes,
    ladder_axes,
    moe_axes,
    prefill_axes,
    profile_named,
    rank_step_axes,
    step_axes,
    tree_axes,
)
from benchmarks._suite import CaseFacts, WallClock, _Suite, _warm_up
from benchmarks.attention import Fp8Attention, TreeAttention
from benchmarks.generation import NEW_TOKENS, Generation
from benchmarks.moe import MoeLayer, layer_cost, random_rows, rank_layer
from benchmarks.step import RankStep, Step
from benchmarks.tree import Accept, Build, Compact
from engine.config import CACHE_LAYOUTS, MODES, PAGE_SIZES, EngineConfig
from engine.kernels import OPS
from engine.presets import TEXTS
from tests.ranks import SMALL

ROOT = Path(__file__).parent.parent
MOST_QUICK_CASES, MOST_HISTORY_CASES = 25, 20
SIDECAR_KEYS = [
    *("schema", "benchmark", "params", "version", "window_id", "run_id", "commit", "machine"),
    *("process_number", "pid", "n", "median_s", "samples_s", "started_at", "ended_at", "timer"),
    *("stage_seconds", "commit_length", "new_tokens", "bytes", "kv_bytes", "flops"),
    *("context_tokens", "programs"),
    *("ceilings", "device", "counters", "validity", "provenance"),
]


class Sleeper(_Suite):
    """Counts what asv's protocol calls and can be told to fail."""

    version = "1"
    params = ([1, 2],)
    param_names = ("length",)

    def build(self, length):
        self.calls = ["build"]
        self.fails = False

    def reset(self):
        self.calls.append("reset")

    def facts(self):
        return CaseFacts(context_tokens=7, stage_seconds={"draft": 0.5})

    def time_sleep(self, length):
        self.calls.append("body")
        if self.fails:
            raise RuntimeError
        time.sleep(0.001 * length)


@pytest.fixture(autouse=True)
def sidecars(tmp_path, monkeypatch):
    for module in ("_suite", "_ceilings", "_step_case", "generation", "moe", "step", "tree"):
        monkeypatch.setattr(f"benchmarks.{module}.DEVICE", "cpu")  # also where there is a GPU
    for name in ("RUN_ID", "COMMIT", "MACHINE", "PROFILE"):
        monkeypatch.delenv(f"DDTREE_BENCH_{name}", raising=False)
    monkeypatch.setenv("DDTREE_BENCH_SIDECAR_DIR", str(tmp_path / "telemetry"))
    return tmp_path / "telemetry"


@pytest.fixture
def at_exit(monkeypatch):
    """What suites want to do when their process ends, to be called by the test."""
    calls = []
    monkeypatch.setattr("benchmarks._case_end.atexit.register", calls.append)

    def leave():
        for call in calls:
            call()

    return leave


def sample(suite, *params):
    """Take one sample the way asv does."""
    suite.setup(*params)
    started = suite.timer()
    getattr(suite, suite._method)(*params)
    return suite.timer() - started


def lines(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def suites():
    for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
        if not module.name.split(".")[1].startswith("_"):
            members = vars(importlib.import_module(module.name)).values()
            yield from (
                cls
                for cls in members
                if isinstance(cls, type)
                and issubclass(cls, (_Suite, _InterleavedSuite))
                and cls.__module__ == module.name
                and not cls.__name__.startswith("_")
            )


def name_of(cls):
    return cls._benchmark if issubclass(cls, _Suite) else cls._identity.benchmark


def num_cases(cls):
    axes = cls.params if isinstance(cls.params[0], (list, tuple)) else [cls.params]
    return math.prod(len(axis) for axis in axes)


def test_the_quick_profile_is_quick():
    counts = {name_of(cls): num_cases(cls) for cls in suites()}

    known = {"step.Step.time_step", "tree.Build.time_build", "generation.Generation.time_generate"}
    assert known <= counts.keys()
    assert sum(counts.values()) <= MOST_QUICK_CASES, counts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("short", ["quick", "history"])
def test_a_short_profile_visits_a_part_of_what_full_visits(short, device):
    quick, full = PROFILES[short], PROFILES["full"]
    pairs = [
        (step_axes(quick, device), step_axes(full, device)),
        (attention_axes(quick, device), attention_axes(full, device)),
        (generation_axes(quick), generation_axes(full)),
        (tree_axes(quick), tree_axes(full)),
    ]
    for few, many in pairs:
        for name in few.__slots__:
            assert set(getattr(few, name)) <= set(getattr(many, name)), name
            assert getattr(few, name), name


def test_quick_is_quick_on_a_gpu_too():
    quick = PROFILES["quick"]
    axes = [step_axes(quick, "cuda"), attention_axes(quick, "cuda"), generation_axes(quick)]
    axes += [cut_step_axes(quick, "cuda"), chunk_axes(quick, "cuda"), prefill_axes(quick, "cuda")]
    counts = [math.prod(len(getattr(one, name)) for name in one.__slots__) for one in axes]
    trees = sum(num_cases(cls) for cls in (Build, Accept, Compact))

    assert sum(counts) + trees <= MOST_QUICK_CASES, counts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_commit_of_a_history_is_few_processes(device):
    history = PROFILES["history"]
    trees = tree_axes(history)
    axes = [step_axes(history, device), attention_axes(history, device), generation_axes(history)]
    axes += [cut_step_axes(history, device), chunk_axes(history, device)]
    counts = [math.prod(len(getattr(one, name)) for name in one.__slots__) for one in axes]
    counts += [len(trees.build_budgets), len(trees.accept_budgets), len(trees.compact_budgets)]

    assert history.rounds == 1
    assert sum(counts) <= MOST_HISTORY_CASES, counts
    assert ladder_axes(history).context_tokens == []


def test_a_line_can_be_fitted_over_the_contexts_of_every_profile():
    for profile in PROFILES.values():
        assert len(step_axes(profile, "cpu").context_tokens) >= 4
        assert len(attention_axes(profile, "cuda").context_tokens) >= 4


def test_the_ladder_is_climbed_in_full_only():
    assert ladder_axes(PROFILES["quick"]).context_tokens == []
    assert ladder_axes(PROFILES["full"]).context_tokens == [1024, 65536, 189440]


def test_a_served_size_is_stepped_in_full_and_on_a_gpu_only():
    for profile in PROFILES.values():
        assert rank_step_axes(profile, "cpu").context_tokens == []
    assert rank_step_axes(PROFILES["quick"], "cuda").context_tokens == []
    full = rank_step_axes(PROFILES["full"], "cuda")
    assert full.context_tokens == [1024, 8192, 32768, 65536, 131072, 189440]
    # All but the definition and what `cuda` takes beside Hopper by itself.
    kernels = set(OPS["tree_attention"].implementations) - {"reference"}
    assert set(full.attention_backends) == kernels - {"cuda_mma"}
    for axes in (attention_axes(PROFILES["full"], "cuda"), cut_step_axes(PROFILES["full"], "cuda")):
        assert set(axes.attention_backends) == kernels
    assert moe_axes(PROFILES["full"], "cuda").num_tokens == [1, 9, 17, 33, 65, 256, 1024]
    assert moe_axes(PROFILES["quick"], "cuda").num_tokens == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_full_visits_all_that_an_engine_can_be_told(device):
    full = PROFILES["full"]
    text = generation_axes(full)

    for axes in (step_axes(full, device), attention_axes(full, device), tree_axes(full)):
        assert tuple(axes.page_sizes) == PAGE_SIZES
    assert (tuple(text.texts), set(text.modes)) == (TEXTS, set(MODES))
    assert tuple(text.cache_layouts) == CACHE_LAYOUTS


def test_a_prompt_and_a_step_behind_as_many_rows_are_measured_by_the_walk_and_by_the_split():
    quick = PROFILES["quick"]
    for axes in (cut_step_axes(quick, "cuda"), chunk_axes(quick, "cuda")):
        assert axes.context_tokens == [65536]
        assert axes.attention_backends == ["triton_serial", "triton_split"]
    for name, device in (("quick", "cpu"), ("history", "cuda"), ("full", "cpu")):
        assert chunk_axes(PROFILES[name], device).context_tokens == []


def test_an_unknown_profile_is_refused():
    with pytest.raises(
        UnknownProfileError, match="expected one of full, history, quick, got 'fast'"
    ):
        profile_named("fast")


def test_a_suite_needs_a_version_of_its_own():
    with pytest.raises(SuiteError, match="explicit version"):
        type("Nameless", (Sleeper,), {})


def test_a_suite_times_one_method():
    with pytest.raises(SuiteError, match="one time_"):
        type("Double", (Sleeper,), {"version": "1", "time_more": lambda self: None})


def test_state_is_built_once_and_reset_before_each_sample():
    suite = Sleeper()
    suite.setup(1)
    suite.calls.clear()
    for _ in range(3):
        sample(suite, 1)

    assert suite.calls == ["reset", "body"] * 3


def test_a_run_of_the_warm_up_ends_before_the_next_begins():
    calls = []
    _warm_up(*(partial(calls.append, name) for name in ("reset", "body", "wait")))

    assert len(calls) >= 6
    assert calls == ["reset", "body", "wait"] * (len(calls) // 3)


def test_asv_reads_the_seconds_of_the_body():
    suite = Sleeper()

    assert 0.002 <= sample(suite, 2) < 5.0


def test_a_process_leaves_one_line_with_every_key(sidecars, at_exit, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_RUN_ID", "run-1")
    monkeypatch.setenv("DDTREE_BENCH_COMMIT", "ab" * 20)
    monkeypatch.setenv("DDTREE_BENCH_MACHINE", "bench-1")
    suite = Sleeper()
    seconds = [sample(suite, 2) for _ in range(4)]
    at_exit()

    (line,) = lines(sidecars)
    assert list(line) == SIDECAR_KEYS
    assert line["samples_s"] == pytest.approx(seconds)
    assert line["median_s"] == pytest.approx(sorted(seconds)[1] / 2 + sorted(seconds)[2] / 2)
    assert (line["n"], line["timer"], line["params"]) == (4, "wall", ["2"])
    assert (line["run_id"], line["commit"], line["machine"]) == ("run-1", "ab" * 20, "bench-1")
    assert (line["context_tokens"], line["stage_seconds"]) == (7, {"draft": 0.5})
    assert (line["bytes"], line["programs"], line["counters"]) == (None, None, {})
    assert (line["validity"], line["device"]["kind"]) == (["no_nvml"], "cpu")
    assert line["ceilings"]["source"] == "measured"
    assert line["ceilings"]["read_bytes_per_s"] > 1e8
    assert line["provenance"]["engine_file"] == "engine/__init__.py"
    assert line["started_at"] < line["ended_at"]
    assert (sidecars / "run-1.jsonl").is_file()


def test_processes_of_a_case_are_numbered_within_their_run(sidecars, at_exit):
    for _ in range(2):
        sample(Sleeper(), 1)
    sample(Sleeper(), 2)
    at_exit()

    numbers = [(line["params"], line["process_number"]) for line in lines(sidecars)]
    assert numbers == [(["1"], 0), (["1"], 1), (["2"], 0)]


def test_a_body_that_fails_leaves_no_line(sidecars, at_exit):
    suite = Sleeper()
    sample(suite, 1)
    suite.fails = True
    with pytest.raises(RuntimeError):
        sample(suite, 1)
    at_exit()

    assert lines(sidecars) == []


def test_a_reset_that_fails_leaves_no_line(sidecars, at_exit):
    suite = Sleeper()
    sample(suite, 1)
    suite.calls = None
    with pytest.raises(AttributeError):
        suite.setup(1)
    at_exit()

    assert lines(sidecars) == []


def test_one_sample_is_marked_as_such(sidecars, at_exit):
    sample(Sleeper(), 1)
    at_exit()

    assert lines(sidecars)[0]["validity"] == ["no_nvml", "single_sample"]


def test_outside_asv_nobody_is_told(monkeypatch):
    monkeypatch.delenv("DDTREE_BENCH_SIDECAR_DIR")
    monkeypatch.delitem(sys.modules, _sidecar.ASV_RUNNER, raising=False)

    assert _sidecar.sidecar_dir(os.environ) is None


def test_under_asv_the_sidecar_lies_beside_its_results(monkeypatch):
    monkeypatch.delenv("DDTREE_BENCH_SIDECAR_DIR")
    monkeypatch.setitem(sys.modules, _sidecar.ASV_RUNNER, sys)

    assert _sidecar.sidecar_dir(os.environ) == ROOT / ".asv" / "results" / "telemetry"


def test_the_wall_clock_waits_for_the_device_at_both_ends():
    waits = []
    clock = WallClock(lambda: waits.append(time.sleep(0.01)))
    clock.start()

    assert clock.stop() >= 0.01
    assert len(waits) == 2


def test_every_sample_of_a_step_times_the_same_step():
    params = (64, 16, 4, "reference")
    suite = Step()
    suite.setup(*params)
    steps = []
    for _ in range(3):
        suite.reset()
        steps.append(suite.engine.step(suite.batch))

    assert [step.commit_lengths for step in steps] == [(4,)] * 3
    assert len({step.token_ids for step in steps}) == 1


def test_a_step_knows_what_it_is_made_of():
    suite = Step()
    suite.build(64, 16, 8, "reference")
    suite.reset()
    facts = suite.facts()

    assert set(facts.stage_seconds) == {"draft", "build", "verify", "commit"}
    assert (facts.context_tokens, facts.commit_length) == (64, 8.0)
    assert facts.bytes > facts.kv_bytes > 0
    assert suite.batch.cache.length(0) == 64 + 8  # the prefix and what the last step committed


def test_a_step_knows_how_many_programs_share_its_attention():
    suite = Step()
    suite.build(64, 16, 4, "reference")
    suite.facts()

    assert suite.num_programs("reference", 17) is None
    assert suite.num_programs("triton_serial", 17) == 2 * suite.num_programs("triton_serial", 16)


def test_a_step_outside_its_regime_is_refused():
    suite = Step()
    suite.build(64, 16, 4, "reference")
    suite.commit_length = 5

    with pytest.raises(SuiteError, match=r"expected 5, got \(4,\)"):
        suite.facts()


class SmallRankStep(RankStep):
    version = "1"
    rank = SMALL
    moe_backend = "reference"
    graphs = "buffers"


@pytest.mark.parametrize(
    "params",
    [
        (64, 1, "paged", 8, "reference"),
        (100, 16, "paged", 1, "reference"),
        (64, 64, "hybrid", 8, "reference"),
    ],
)
def test_a_ranks_step_is_the_same_each_time_and_in_its_regime(params):
    context_tokens, page_size, cache_layout, commit_length, _ = params
    suite = SmallRankStep()
    suite.setup(*params)
    steps = []
    for _ in range(3):
        suite.reset()
        assert suite.batch.cache.length(0) == context_tokens
        steps.append(suite.engine.step(suite.batch))
    facts = suite.facts()

    assert [step.commit_lengths for step in steps] == [(commit_length,)] * 3
    assert len({step.token_ids for step in steps}) == 1
    assert (suite.batch.cache.shape.page_size, suite.batch.scratch is None) == (
        page_size, cache_layout == "paged",
    )  # fmt: skip
    assert (facts.context_tokens, facts.commit_length) == (context_tokens, float(commit_length))
    assert set(facts.stage_seconds) == {"draft", "build", "verify", "commit"}
    assert suite.batch.pending.counts == (commit_length,)
    latent_rows = 3 * 40 * (context_tokens + 9) * 2
    assert facts.kv_bytes > latent_rows


def test_trees_of_a_rank_leave_pages_of_one_size_only():
    with pytest.raises(NotImplementedError, match="hybrid: of pages of 64 rows only"):
        SmallRankStep().build(64, 1, "hybrid", 8, "reference")


def test_a_gpu_without_room_for_a_rank_skips_it(monkeypatch):
    monkeypatch.setattr("benchmarks.step.DEVICE", "cuda")
    for free, is_enough in ((77e9, False), (141e9, True)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda free=free: (int(free), 0))
        config = EngineConfig(max_context=190000, page_size=1)
        with nullcontext() if is_enough else pytest.raises(NotImplementedError, match="needs 1"):
            RankStep().check_room(config)


@pytest.mark.parametrize("num_tokens", [1, 9, 65])
def test_a_layer_of_experts_counts_those_that_its_tokens_hit(num_tokens):
    suite = MoeLayer()
    suite.build(num_tokens, "reference")
    suite.reset()
    suite.time_cold(num_tokens, "reference")
    facts = suite.facts()

    ids = suite.moe.router(suite.x).expert_ids
    expert, num_hit = 3 * 64 * 256 * 4, len(set(ids.flatten().tolist()))
    around = 12 * 256 * 4 + expert + 2 * num_tokens * 256 * 4  # router, shared expert, rows
    assert facts.bytes == num_hit * expert + around
    assert num_hit == 3 if num_tokens == 1 else 3 < num_hit <= 12
    assert facts.flops == 2 * num_tokens * (4 * 3 * 64 * 256 + 12 * 256)


def test_a_ranks_layer_is_counted_as_it_is_packed(monkeypatch):
    monkeypatch.setattr("benchmarks.moe.DTYPE", torch.bfloat16)
    moe = rank_layer(SMALL.target, "cpu")
    x = random_rows(5, moe)

    cost = layer_cost(moe, x)

    num_hit = len(set(moe.router(x).expert_ids.flatten().tolist()))
    expert = 3 * 32 * 64
    assert cost.bytes == num_hit * expert * 9 // 16 + 2 * (16 * 64 + expert) + 2 * 5 * 64 * 2
    assert cost.flops == 2 * 5 * (5 * expert + 16 * 64)
    assert moe(x).isfinite().all()


def test_every_sample_of_a_text_decodes_the_same_tokens():
    params = ("prose", "ddtree", 1.0, "paged")
    suite = Generation()
    suite.build(*params)
    texts = set()
    for _ in range(3):
        suite.reset()
        assert suite.batch.sequences[0].new_token_ids == ()
        suite.time_generate(*params)
        texts.add(suite.batch.sequences[0].new_token_ids)

    (text,) = texts
    suite.reset()
    assert suite.facts().new_tokens == len(text) >= NEW_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_modes_and_layouts_of_a_text_differ_in_their_steps_and_not_in_their_tokens(temperature):
    texts, lengths = set(), {}
    for mode, cache_layout in (*((mode, "paged") for mode in MODES), ("ddtree", "hybrid")):
        suite = Generation()
        suite.build("code", mode, temperature, cache_layout)
        suite.time_generate("code", mode, temperature, cache_layout)
        texts.add(suite.batch.sequences[0].new_token_ids[:NEW_TOKENS])
        lengths[mode, cache_layout] = len(suite.batch.sequences[0].commit_lengths)

    assert len(texts) == 1
    assert lengths["ddtree", "paged"] == lengths["ddtree", "hybrid"] < lengths["ar", "paged"]
    assert lengths["ar", "paged"] == NEW_TOKENS


def test_the_text_decides_how_much_a_step_commits():
    facts = {}
    for text in ("predictable", "prose"):
        suite = Generation()
        suite.build(text, "ddtree", 0.0, "paged")
        facts[text] = suite.facts()

    assert facts["predictable"].commit_length > 1.5 * facts["prose"].commit_length
    assert facts["predictable"].bytes < facts["prose"].bytes  # fewer steps read the weights


def test_a_sample_of_decoding_without_drafts_reads_no_drafter():
    suite = Generation()
    suite.build("prose", "ar", 0.0, "paged")
    facts = suite.facts()
    latent_row = 4 * (64 + 16) * 4  # layers of kv_lora_rank and rope elements of four bytes

    assert facts.commit_length == 1.0
    assert facts.context_tokens == 256
    assert facts.kv_bytes == latent_row * sum(range(256, 256 + NEW_TOKENS))


def test_attention_over_fp8_rows_moves_fewer_bytes_and_is_another_series():
    cases = {}
    for suite in (TreeAttention(), Fp8Attention()):
        assert sample(suite, 100, "reference", 16) > 0.0
        cases[name_of(type(suite))] = suite.facts()

    plain, coded = (
        cases[f"attention.{name}.time_cold"] for name in ("TreeAttention", "Fp8Attention")
    )
    assert (plain.kv_bytes, coded.kv_bytes) == (109 * 576 * 4, 109 * 656)
    assert plain.flops == coded.flops


def test_the_walk_goes_to_the_deepest_node():
    suite = Accept()
    suite.build(16)

    assert suite.facts().commit_length == pytest.approx(
        sum(1 + int(tree.depths.max()) for tree in suite.trees) / len(suite.trees)
    )


def test_compaction_starts_from_the_same_prefix_each_time():
    suite = Compact()
    suite.build(16, 16)
    for _ in range(2):
        suite.reset()
        before = suite.cache.length(0)
        suite.time_commit(16, 16)

    assert (before, suite.cache.length(0)) == (1024, 1024 + 8)


def test_building_spends_the_whole_budget():
    suite = Build()
    suite.build(16)

    assert suite.logits.dtype == torch.float32
    assert suite.facts().bytes == 7 * 163840 * 4


@pytest.mark.slow
def test_asv_finds_these_suites_and_its_samples_are_the_sidecars(sidecars, tmp_path):
    def runner(*words):
        subprocess.run(
            [sys.executable, asv.benchmark.__file__, *words],
            cwd=tmp_path,
            env={**os.environ, "ASV_PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            check=True,
        )

    folder = str(ROOT / "benchmarks")
    runner("discover", folder, "found.json")
    runner("run", folder, "tree.Accept.time_accept-0", "{}", "None", "result.json")

    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    versions = {name_of(cls): cls.version for cls in suites()}
    assert {case["name"]: case["version"] for case in found} == versions
    visited_here = asv.benchmarks.Benchmarks(argparse.Namespace(benchmark_dir=folder), found)
    assert set(visited_here) == {name_of(cls) for cls in suites() if num_cases(cls)}
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    (line,) = lines(sidecars)
    assert line["samples_s"] == pytest.approx(result["samples"], rel=1e-6)
    assert (line["benchmark"], line["n"]) == ("tree.Accept.time_accept", len(result["samples"]))
