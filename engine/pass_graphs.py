"""Target passes in buffers that stay where they are, so that one CUDA graph is replayed for many.

::

    bucket    number of trees, rows of a tree, width of the page table, storage of the rows, and how
              tokens are chosen
    buffers   token ids, positions, slots, page table, lengths, ancestor words, tree sizes, and
              seeds where tokens are drawn
    a pass    the buffers of its bucket are overwritten whole; what was captured over them runs

A tree that is smaller than its bucket is filled up with children of its root that nobody walks to,
so a pass of a bucket is a pass like any other. What it gives lies in the bucket's own memory and
holds until the next pass. `buffers` is the slow twin of `cuda`: the same buffers, no graph.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import EngineConfig
from engine.device import Place, upload
from engine.draft_tree import DraftTree
from engine.errors import ConfigError
from engine.kernels import greedy_tokens
from engine.sampling import Sampling, chosen_log_probs, tokens_or_none
from engine.target import PassRows, Target

T = TypeVar("T")  # what runs over fixed buffers gives

MOST_BUCKETS = 16  # whose buffers and graphs are kept; the one not used for longest goes
WARM_UP_PASSES = 2  # compile, then settle what libraries allocate on first use
_ROW_BUFFERS = ("token_ids", "positions")
_PLAN_BUFFERS = ("slots", "page_table", "context_lens", "ancestor_bits", "tree_sizes")


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """What a pass gives for its M rows; of a bucket's, until its next pass."""

    tokens: Tensor  # [M] int64, what the target says after each row, `NO_TOKEN` if nothing
    log_probs: Tensor  # [M], of those tokens
    taps: Tensor  # [M, num_taps * hidden]
    slots: Tensor  # [M] int64, where each row was written


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """How the token after each row of a pass is chosen."""

    sampling: Sampling
    seeds: Tensor | None = None  # [M] int64; greedy needs none


class RunPass(Protocol):
    """Runs one target pass."""

    def __call__(self, rows: PassRows, choice: Choice) -> Passed:
        """Write the latent rows of `rows` and return what the target says after each."""


@runtime_checkable
class Steered(Protocol):
    """A target that changes what its head said before anybody hears it."""

    def steer(self, logits: Tensor, positions: Tensor) -> None:
        """Change the logits [M, V] (mutated) of rows at `positions` [M]."""


class Capture(Protocol):
    """Makes what runs over fixed buffers repeatable."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return what runs it again, with what the buffers then hold."""


def pass_runner(target: Target, tap_ids: Sequence[int], config: EngineConfig) -> RunPass:
    """Return what an engine's configuration asks for.

    Raises
    ------
    ConfigError
        CUDA graphs are wanted of a target that is on no CUDA device.
    """
    plain = PlainPass(target, tuple(tap_ids))
    if config.graphs == "off":
        return plain
    return BucketPass(plain, capture_for(config, target.device))


def capture_for(
    config: EngineConfig, device: torch.device, *, warm_up_passes: int = WARM_UP_PASSES
) -> Capture:
    """Return how an engine that keeps buffers runs what stands over them.

    Raises
    ------
    ConfigError
        CUDA graphs are wanted where there is no CUDA device.
    """
    if config.graphs == "buffers":
        return repeated
    if device.type != "cuda":
        raise ConfigError(
            f"graphs: expected off or buffers for a target on {device.type}, got 'cuda' (only "
            "CUDA devices capture)"
        )
    return CudaCapture(device, warm_up_passes)


def address(tensor: Tensor) -> Hashable:
    """Return what two tensors have in common that are the same memory seen alike."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Kept(Generic[T]):
    """What was made for a few keys; that used last longest ago goes first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: dict[Hashable, T] = {}  # in the order of their last use

    def get(self, key: Hashable, make: Callable[[], T]) -> tuple[T, bool]:
        """Return the value of `key`, and whether it was there before."""
        was_there = key in self.values
        value = self.values.pop(key) if was_there else make()
        self.values[key] = value
        if len(self.values) > self.most:
            del self.values[next(iter(self.values))]
        return value, was_there


@dataclass(frozen=True, slots=True)
class PlainPass:
    """Launches every operation of a pass anew."""

    target: Target
    tap_ids: tuple[int, ...]

    def __call__(self, rows: PassRows, choice: Choice) -> Passed:
        """Run the target and its head, then choose."""
        passed = self.target.forward(rows, self.tap_ids)
        logits = self.target.head(passed.hidden)
        if isinstance(self.target, Steered):
            self.target.steer(logits, rows.positions)
        said = choose(logits, rows, choice)
        return Passed(*said, passed.taps, rows.attention.slots)


def choose(logits: Tensor, rows: PassRows, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return the token after each row, by its logits [M, V], and its log-prob."""
    if choice.sampling.is_greedy:
        said = greedy_tokens(logits, backend=rows.attention.rows_backend)
        return said.tokens, said.log_probs
    positions = rows.positions + 1  # of the token chosen after each row
    seeds = 0 if choice.seeds is None else choice.seeds
    tokens = tokens_or_none(logits, positions, seeds, choice.sampling)
    return tokens, chosen_log_probs(logits, tokens.clamp(min=0))


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Buffers of passes of one shape, and what runs over them."""

    rows: PassRows
    choice: Choice
    run: Callable[[], Passed]

    def load(self, rows: PassRows, choice: Choice) -> None:
        """Overwrite every buffer (mutated)."""
        new = buffers(rows, choice)
        for held, one in zip(buffers(self.rows, self.choice), new, strict=True):
            held.copy_(one)


class BucketPass:
    """Runs passes of equal shape in the same buffers.

    Parameters
    ----------
    run : RunPass
        What a pass is.
    capture : Capture
        Called once for each bucket, with the buffers holding a real pass: it may run it.
    """

    def __init__(self, run: RunPass, capture: Capture) -> None:
        self._run = run
        self._capture = capture
        self._kept: Kept[Bucket] = Kept(MOST_BUCKETS)

    @property
    def buckets(self) -> dict[Hashable, Bucket]:
        """The buckets in the order of their last use."""
        return self._kept.values

    def __call__(self, rows: PassRows, choice: Choice) -> Passed:
        """Run a pass, captured before if there was one of its shape over the same storage."""
        key = bucket_key(rows, choice)
        bucket, was_there = self._kept.get(key, lambda: self._new_bucket(rows, choice))
        if was_there:
            bucket.load(rows, choice)
        return bucket.run()

    def _new_bucket(self, rows: PassRows, choice: Choice) -> Bucket:
        plan = rows.attention
        if plan.padded_index is not None:
            raise ConfigError(
                f"rows: expected trees of one size, got {rows.tree_sizes} (a bucket has one: "
                "fill_up)"
            )
        held = replace(
            rows,
            **{name: getattr(rows, name).clone() for name in _ROW_BUFFERS},
            attention=replace(
                plan, **{name: getattr(plan, name).clone() for name in _PLAN_BUFFERS}
            ),
        )
        seeds = None if choice.seeds is None else choice.seeds.clone()
        chosen = replace(choice, seeds=seeds)
        return Bucket(held, chosen, self._capture(lambda: self._run(held, chosen)))


def repeated(run: Callable[[], T]) -> Callable[[], T]:
    """Run it anew each time, over the same buffers."""
    return run


class Recurring:
    """Runs what comes again over the same memory: launched the first time, then captured.

    So a run may change what it reads, and what comes once is never captured. A key must tell apart
    all in which runs differ but what their memory holds: the address of everything that is read or
    written, and whatever the host knows.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._kept: Kept[list[Callable[[], Any]]] = Kept(MOST_BUCKETS)
        self._places: dict[Hashable, Place] = {}

    def place(self, name: str, values: Tensor, device: torch.device) -> Tensor:
        """Bring numbers of the host up, to where those of their name and shape always lie."""
        if self._capture is None:
            return upload(values, device)
        there = self._places.get((name, values.shape))
        if there is not None:
            return there.bring(values)
        there = self._places[name, values.shape] = Place(values, device)
        return there.held

    def __call__(self, key: Hashable, run: Callable[[], T]) -> T:
        """Run it, or what was captured under its key."""
        if self._capture is None:
            return run()
        captured, was_there = self._kept.get(key, list)
        if not was_there:
            return run()
        if not captured:
            captured.append(self._capture(run))
        given: T = captured[0]()
        return given


class CudaCapture:
    """Captures runs of one kind in CUDA graphs that share their memory: one runs at a time."""

    def __init__(self, device: torch.device, warm_up_passes: int = WARM_UP_PASSES) -> None:
        self._device = device
        self._warm_up_passes = warm_up_passes
        self._pool: Any = None  # torch's handle of it, once there is one

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        """Run it outside a graph first, which compiles, unless that was done; then capture it."""
        with torch.cuda.device(self._device):
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            main = torch.cuda.current_stream()
            aside.wait_stream(main)
            with torch.cuda.stream(aside):
                for _ in range(self._warm_up_passes):
                    run()
            main.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                given = run()
            self._pool = graph.pool()

        def replay() -> T:
            graph.replay()
            return given

        return replay


def buffers(rows: PassRows, choice: Choice) -> list[Tensor]:
    """Return the tensors in which passes of one bucket differ."""
    of_rows = [getattr(rows, name) for name in _ROW_BUFFERS]
    of_choice = [] if choice.seeds is None else [choice.seeds]
    return [*of_rows, *(getattr(rows.attention, name) for name in _PLAN_BUFFERS), *of_choice]


def bucket_key(rows: PassRows, choice: Choice) -> Hashable:
    """Return what passes have in common that can run in the same buffers."""
    plan = rows.attention
    pages = plan.cache.layer(0)
    scratch = None if plan.scratch is None else plan.scratch.rows
    storages = [(one.data_ptr(), one.shape) for one in (pages, scratch) if one is not None]
    # Of the other buffers there is one number for each row or for each tree.
    shapes = (rows.token_ids.shape, plan.ancestor_bits.shape, plan.page_table.shape)
    options = (scratch is None, plan.backend, rows.moe_backend, choice.sampling)
    return (*shapes, choice.seeds is None, *storages, *options)


def tree_bucket(tree_size: int, largest: int) -> int:
    """Return the rows that a tree is filled up to: the root and a power of two, or `largest`."""
    if tree_size <= 1:
        return 1
    return min(1 + (1 << (tree_size - 2).bit_length()), max(tree_size, largest))


def fill_up(trees: Sequence[DraftTree], largest: int) -> list[DraftTree]:
    """Return the trees of a batch filled up to one size of a bucket, `largest` at most."""
    size = tree_bucket(max(tree.tree_size for tree in trees), largest)
    return [_filled(tree, size - tree.tree_size) for tree in trees]


def _filled(tree: DraftTree, count: int) -> DraftTree:
    """Give the root `count` children more, which carry its own token."""
    if not count:
        return tree
    tokens = tree.token_ids[:1].expand(count)
    return DraftTree(
        token_ids=torch.cat((tree.token_ids, tokens)),
        parents=functional.pad(tree.parents, (0, count), value=0),
        depths=functional.pad(tree.depths, (0, count), value=1),
        path_log_probs=functional.pad(tree.path_log_probs, (0, count), value=-torch.inf),
    )
