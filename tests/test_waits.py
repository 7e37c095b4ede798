"""A step waits for the device twice: for the draft's candidates, and for what the target said.

On a CPU nothing waits, so what would is told by a device of paper: tensors of the models and all
that comes from them. An operation that would read one back to the host, or whose output's size
depends on its values, is a wait; a copy to the host is one too and is counted.
"""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import Engine, EngineConfig, ShapeError, build_draft_tree, chain_tree, root_tree
from engine.config import MODES
from engine.draft_tree import build_draft_trees, chain_trees
from engine.presets import Preset, preset, random_drafter, random_target
from engine.sampling import GREEDY, Sampling
from engine.verify import Verified

# Dense layers: the experts' reference reads back which are hit, its kernels do not.
TARGET = random_target(
    replace(preset("nano").target.config, first_k_dense_replace=2),
    device="cpu", dtype=torch.float32, seed=0,
)  # fmt: skip
MODELS = Preset(TARGET, random_drafter(preset("nano").drafter.config, TARGET, seed=0))
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "bincount")


class Paper(TorchDispatchMode):
    """Follows the tensors that a GPU would hold through every operation of a step."""

    def __init__(self, held):
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.kept = []  # a freed address would be another tensor's
        self.waits = Counter()

    def is_held(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.storages

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        name = operation.overloadpacket.__name__
        is_device = any(map(self.is_held, tensors))
        indices = args[1] if name in ("index", "index_put_", "index_put") else ()
        by_mask = any(one is not None and one.dtype == torch.bool for one in indices)
        if is_device and (name in WAITS or by_mask):
            self.waits[name] += 1
        out = operation(*args, **(kwargs or {}))
        if is_device:
            for one in tree_leaves(out):
                if isinstance(one, torch.Tensor):
                    self.kept.append(one)
                    self.storages.add(one.untyped_storage().data_ptr())
        return out


@contextmanager
def on_paper(engine, batch, monkeypatch):
    models = [*engine.target.tensors.values(), engine.cache.pages]
    if engine.drafter is not None:
        models += engine.drafter.tensors.values()
        models += [*batch.context.keys, *batch.context.values]
    paper = Paper(models)
    to_host = torch.Tensor.cpu

    def cpu(tensor):
        if not paper.is_held(tensor):
            return to_host(tensor)
        paper.waits["cpu"] += 1
        return torch.tensor(tensor.numpy().copy())

    def tolist(tensor, plain=torch.Tensor.tolist):
        if paper.is_held(tensor):
            paper.waits["tolist"] += 1
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    with paper:
        yield paper


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_k=5, top_p=0.9, min_p=0.01)])
@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_reads_back_its_candidates_and_what_the_target_said(
    mode, layout, sampling, monkeypatch
):
    config = EngineConfig(mode=mode, cache_layout=layout, node_budget=6, max_context=64)
    engine = Engine(MODELS.target, MODELS.drafter, config)
    batch = engine.prefill([[1, 2, 3, 4, 5], [6, 7]], sampling=sampling)
    engine.step(batch)

    with on_paper(engine, batch, monkeypatch) as paper:
        engine.step(batch)

    assert paper.waits == {"cpu": 1 if mode == "ar" else 2}


def test_paper_sees_a_read_of_what_it_holds(monkeypatch):
    engine = Engine(MODELS.target, None, EngineConfig(mode="ar"))
    batch = engine.prefill([[1, 2]])

    with on_paper(engine, batch, monkeypatch) as paper:
        row = engine.target.embed_tokens[0] * 2.0
        bool((row > 0).any())
        row[row > 0] = 0.0
        row.tolist()
        torch.arange(3).tolist()

    assert paper.waits == {"_local_scalar_dense": 1, "index_put_": 1, "tolist": 1}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_k=5, top_p=0.9, min_p=0.01)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_distribution_are_refused_before_anything_is_kept(bad, sampling):
    engine = Engine(MODELS.target, MODELS.drafter, EngineConfig(node_budget=6, max_context=64))
    batch = engine.prefill([[1, 2, 3, 4, 5]], sampling=sampling)
    trees = engine.build(batch, engine.draft(batch))
    head = engine.target.head
    engine.target.head = lambda hidden: head(hidden).index_fill(0, torch.tensor([4]), bad)
    try:
        verified = engine.verify(batch, trees)
    finally:
        engine.target.head = head
    before = list(batch.sequences[0].token_ids)

    with pytest.raises(ShapeError, match="logits: expected a finite maximum in each row"):
        engine.commit(batch, trees, verified)

    assert batch.sequences[0].token_ids == before
    assert batch.cache.length(batch.seqs[0]) == 4


def test_what_the_target_said_comes_back_bit_for_bit():
    tokens = torch.tensor([[2**40 + 1, 7]])
    for dtype in (torch.float32, torch.float64):
        log_probs = torch.tensor([[-1 / 3, math.nan]], dtype=dtype)

        said = Verified(tokens, log_probs, torch.empty(0), (0,), torch.empty(0)).to_host(
            [root_tree(5)]
        )

        assert torch.equal(said.target_tokens, tokens)
        assert said.log_probs[0, 0].item() == log_probs[0, 0].item()


@pytest.mark.parametrize("build_all", [build_draft_trees, chain_trees])
def test_a_batch_of_drafts_gives_the_trees_of_each_alone(build_all):
    logits = torch.randn(3, 7, 23, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = -torch.inf  # ends there
    build = build_draft_tree if build_all is build_draft_trees else chain_tree

    together = build_all(logits, [4, 5, 6], 9)

    for tree, row, root in zip(together, logits, (4, 5, 6), strict=True):
        alone = build(row, root_token=root, node_budget=9)
        for name in ("token_ids", "parents", "depths", "path_log_probs"):
            assert torch.equal(getattr(tree, name), getattr(alone, name))


@pytest.mark.parametrize("node_budget", [0, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_draft_that_is_no_distribution_refuses_all(bad, node_budget):
    logits = torch.zeros(2, 3, 8)
    logits[1, 2, 7] = bad

    with pytest.raises(ShapeError, match=r"expected no NaN and no \+inf"):
        build_draft_trees(logits, [0, 0], node_budget)


@pytest.mark.parametrize("logits", [torch.zeros(3, 8), torch.zeros(1, 3, 8, dtype=torch.float16)])
def test_drafts_of_another_shape_or_dtype_are_refused(logits):
    with pytest.raises(ShapeError, match=r"expected \[N, horizon, V\] float32"):
        build_draft_trees(logits, [0], 4)
