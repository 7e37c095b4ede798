"""In bfloat16 a text parts from autoregressive decoding's only where that is not sure itself.

How a sum is rounded depends on the shape of the pass it is in, so autoregressive decoding with
another batch size, or with its prompt in other chunks, is another decoder and as good as the first.
A token's score is its logit over the temperature plus, where it is sampled, its noise: the highest
score is chosen.

    gap      score of the first choice minus that of the second, at one prefix
    noise    the largest change of a gap between shapes of autoregressive decoding, the two tokens
             and the prefix being the same; over all prefixes of its texts
    deficit  how far a token's score lies under the best of its own prefix, in the first shape

Every token of every mode must have a deficit within the noise. Where a text first leaves
autoregressive decoding's, the prefix is still the same, and the gap there is at most the deficit of
the token that came instead: so it is within the noise as well.
"""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.draft_tree import DraftTree
from engine.kv_cache import CacheShape, LatentCache
from engine.presets import preset
from engine.sampling import GREEDY, Sampling, gumbel_noise
from engine.verify import Backends, append_chain, chain, plan_pass
from tests.windows import windows

pytestmark = pytest.mark.slow

NEW_TOKENS = 12
PROMPTS = windows(24, seed=1)
SEEDS = [101 * n for n in range(len(PROMPTS))]
BATCH, CHUNK = 4, 64  # the first shape of autoregressive decoding, and the engine's
OTHER_SHAPES = ((1, 64), (8, 16), (3, 5))  # batch size, tokens of a prefill pass
PAGE_SIZE = 16
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MACHINES = [
    ("cpu", "reference"),
    pytest.param("cuda", "reference", marks=CUDA),
    pytest.param("cuda", "triton_split", marks=CUDA),
]
SAMPLINGS = [GREEDY, Sampling(1.0)]


@functools.cache
def pair_on(device):
    return preset("tiny", device=device, dtype=torch.bfloat16)


def decode(engine, sampling):
    texts = []
    for first in range(0, len(PROMPTS), BATCH):
        generations = engine.generate(
            PROMPTS[first : first + BATCH],
            max_new_tokens=NEW_TOKENS,
            sampling=sampling,
            seed=SEEDS[first : first + BATCH],
        )
        texts += [generation.token_ids for generation in generations]
    return texts


def scores_in_shape(target, backend, texts, sampling, shape):
    """Decode `texts` once more, one token at a time: the scores before each, [texts, tokens, V]."""
    batch_size, chunk_size = shape
    config = target.config
    num_pages = len(texts) * -(-(max(map(len, PROMPTS)) + NEW_TOKENS) // PAGE_SIZE)
    cache_shape = CacheShape(config.num_hidden_layers, num_pages, PAGE_SIZE, config.latent_dim)
    cache = LatentCache(cache_shape, dtype=target.dtype, device=target.device)
    parts = []
    for first in range(0, len(texts), batch_size):
        seqs = range(len(texts))[first : first + batch_size]
        for seq, start in itertools.product(seqs, range(0, max(map(len, PROMPTS)), chunk_size)):
            if known := PROMPTS[seq][:-1][start : start + chunk_size]:
                append_chain(target, cache, seq, known, backends=Backends(backend), tap_ids=())
        steps = []
        for step in range(NEW_TOKENS):
            roots = [chain([[PROMPTS[seq][-1], *texts[seq]][step]]) for seq in seqs]
            rows = plan_pass(cache, seqs, roots, Backends(backend))
            steps.append(target.head(target.forward(rows, ()).hidden).double())
            for seq in seqs:
                cache.advance(seq, 1)
        parts.append(torch.stack(steps, dim=1))
    return with_noise(torch.cat(parts), sampling)


def with_noise(logits, sampling):
    if sampling.is_greedy:
        return logits
    positions = torch.tensor([[len(p) + n for n in range(NEW_TOKENS)] for p in PROMPTS])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel_noise(positions, torch.tensor(SEEDS)[:, None], ids, logits.shape[:-1])
    return logits / sampling.temperature + noise


@dataclass(frozen=True, slots=True, eq=False)
class Autoregressive:
    """Texts of autoregressive decoding, how sure it is of each token, and how unsure of that."""

    texts: list[tuple[int, ...]]
    gaps: torch.Tensor  # [texts, tokens]
    noise: float


@functools.cache
def autoregressive(device, backend, sampling):
    target = pair_on(device).target
    config = EngineConfig(mode="ar", attention_backend=backend, prefill_chunk=CHUNK)
    texts = decode(Engine(target, None, config), sampling)
    shapes = ((BATCH, CHUNK), *OTHER_SHAPES)
    first, *others = (scores_in_shape(target, backend, texts, sampling, s) for s in shapes)
    best_two = first.topk(2).indices

    def gaps(scores):
        pairs = scores.gather(-1, best_two)
        return pairs[..., 0] - pairs[..., 1]

    noise = max(float((gaps(scores) - gaps(first)).abs().max()) for scores in others)
    assert (below_best(first, texts) == 0.0).all()  # the replay is what was decoded
    return Autoregressive(texts, gaps(first), noise)


def deficits(device, backend, texts, sampling):
    """The deficit of each token at its own prefix, [texts, tokens]."""
    target = pair_on(device).target
    scores = scores_in_shape(target, backend, texts, sampling, (BATCH, CHUNK))
    return below_best(scores, texts)


def below_best(scores, texts):
    chosen = scores.gather(-1, torch.tensor(texts, device=scores.device)[..., None])
    return scores.amax(-1) - chosen[..., 0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("device", "backend"), MACHINES)
def test_autoregressive_decoding_is_sure_of_most_tokens(device, backend, sampling):
    """Otherwise what is within its noise would say nothing."""
    own = autoregressive(device, backend, sampling)

    assert own.noise > 0.0
    assert float((own.gaps > own.noise).double().mean()) > 0.5


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("mode", "layout"), [("ddtree", "paged"), ("ddtree", "hybrid"), ("dflash", "paged")]
)
@pytest.mark.parametrize(("device", "backend"), MACHINES)
def test_a_text_leaves_autoregressive_decoding_within_its_noise(
    device, backend, mode, layout, sampling
):
    own = autoregressive(device, backend, sampling)
    models = pair_on(device)
    config = EngineConfig(
        mode=mode, cache_layout=layout, attention_backend=backend, prefill_chunk=CHUNK
    )

    texts = decode(Engine(models.target, models.drafter, config, page_fill=torch.nan), sampling)

    for index, (text, expected) in enumerate(zip(texts, own.texts, strict=True)):
        if text != expected:
            parted = next(n for n in range(NEW_TOKENS) if text[n] != expected[n])
            assert float(own.gaps[index, parted]) <= own.noise
    if texts != own.texts:
        assert float(deficits(device, backend, texts, sampling).max()) <= own.noise


class Blind(Engine):
    """An engine in whose verify pass a node does not see the parent of its parent."""

    def verify(self, batch, trees):
        return super().verify(batch, [without_grandparents(tree) for tree in trees])


def without_grandparents(tree):
    """The same nodes at the same depths, each of depth 3 a child of the root."""
    parents = tree.parents.masked_fill(tree.depths == 3, 0)
    return DraftTree(tree.token_ids, parents, tree.depths, tree.path_log_probs)


@pytest.mark.parametrize(("device", "backend"), MACHINES)
def test_a_wrong_ancestor_mask_is_beyond_the_noise(device, backend):
    """The test above can fail: a pass that is wrong in two bits of a deep node's mask."""
    own = autoregressive(device, backend, GREEDY)
    models = pair_on(device)
    engine = Blind(models.target, models.drafter, EngineConfig(attention_backend=backend))

    texts = decode(engine, GREEDY)

    assert float(deficits(device, backend, texts, GREEDY).max()) > own.noise
