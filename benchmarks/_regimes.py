"""Which cases a run visits: the profile says how many, the device says how large.

A profile never changes a case's identity. Class, method, parameter names and values are the same
in every profile, and the values of `history` and `quick` are subsets of those of `full`, so that
results of all continue one series. All suites of `quick` together have at most 25 cases; those of
`history`, which visits commit after commit, at most 20 and one round. In both, one process serves
the cases of a round in turn: on a GPU most of a short case is the start of its process. This module
knows the axes; what a case does stands in its suite.
It imports no torch: asv starts a process for each case, and some only hand on what others measured.
"""

import os
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T", int, str)

WALK_AND_SPLIT: Final = ["triton_serial", "triton_split"]
EVERY_KERNEL: Final = [*WALK_AND_SPLIT, "cuda", "cuda_mma"]
PROFILE_VARIABLE: Final = "DDTREE_BENCH_PROFILE"


class UnknownProfileError(Exception):
    """`DDTREE_BENCH_PROFILE` names no profile."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How long a run may take, in asv's words and ours."""

    name: str
    rounds: int  # processes a case is measured in; their medians are the independent samples
    repeat: tuple[int, int, float]  # samples a process: least, most, seconds after which to stop
    window_s: float  # length of the telemetry window of a case on a GPU
    shares_process: bool = False  # the cases of a round are served by one process in turn


PROFILES: Final = {
    "history": Profile(
        name="history", rounds=1, repeat=(5, 20, 0.5), window_s=0.5, shares_process=True
    ),
    "quick": Profile(
        name="quick", rounds=2, repeat=(5, 20, 0.5), window_s=1.0, shares_process=True
    ),
    "full": Profile(name="full", rounds=4, repeat=(10, 60, 3.0), window_s=3.0),
}


@dataclass(frozen=True, slots=True)
class StepAxes:
    """The axes of `step.Step`, in the order of its parameters."""

    context_tokens: list[int]
    page_sizes: list[int]
    commit_lengths: list[int]
    attention_backends: list[str]


@dataclass(frozen=True, slots=True)
class RankStepAxes:
    """The axes of `step.RankStep`, in the order of its parameters; none without a GPU."""

    context_tokens: list[int]
    page_sizes: list[int]
    cache_layouts: list[str]
    commit_lengths: list[int]
    attention_backends: list[str]


@dataclass(frozen=True, slots=True)
class PrefillAxes:
    """The axes of the suites in `prefill.py`."""

    context_tokens: list[int]
    page_sizes: list[int]
    attention_backends: list[str]


@dataclass(frozen=True, slots=True)
class DrafterAxes:
    """The axes of `drafter.Draft`, in the order of its parameters."""

    context_tokens: list[int]
    context_rows: list[str]
    drafter_contexts: list[int]


@dataclass(frozen=True, slots=True)
class MoeAxes:
    """The axes of `moe.MoeLayer`, in the order of its parameters."""

    num_tokens: list[int]
    moe_backends: list[str]


@dataclass(frozen=True, slots=True)
class GenerationAxes:
    """The axes of `generation.Generation`, in the order of its parameters."""

    texts: list[str]
    modes: list[str]
    temperatures: list[float]
    cache_layouts: list[str]


@dataclass(frozen=True, slots=True)
class AttentionAxes:
    """The axes of `attention.TreeAttention`, in the order of its parameters."""

    context_tokens: list[int]
    attention_backends: list[str]
    page_sizes: list[int]


@dataclass(frozen=True, slots=True)
class TreeAxes:
    """The axes of the suites in `tree.py`."""

    build_budgets: list[int]
    accept_budgets: list[int]
    compact_budgets: list[int]
    page_sizes: list[int]


@dataclass(frozen=True, slots=True)
class LadderAxes:
    """The axis of `ladder.Ladder` that a profile decides; the variants are always all of them."""

    context_tokens: list[int]


def profile_named(name: str) -> Profile:
    """Return the profile called `name`; `UnknownProfileError` lists the known ones."""
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise UnknownProfileError(
            f"{PROFILE_VARIABLE}: expected one of {known}, got {name!r} (which cases to run)"
        )
    return PROFILES[name]


def _of(profile: Profile, *, quick: list[T], history: list[T]) -> list[T]:
    """Return the values of one of the two short profiles."""
    return history if profile.name == "history" else quick


def step_axes(profile: Profile, device: str) -> StepAxes:
    """Return the axes of the step suite: on a CPU at least four contexts, to fit a line."""
    full = profile.name == "full"
    commit_lengths = [1, 4, 8] if full else _of(profile, quick=[1, 8], history=[8])
    if device == "cuda":
        return StepAxes(
            context_tokens=[1024, 4096, 16384, 65536] if full else [1024, 16384],
            page_sizes=[1, 16, 32, 64, 128] if full else [64],
            commit_lengths=commit_lengths,
            attention_backends=["triton_serial", "triton_split"] if full else ["triton_split"],
        )
    return StepAxes(
        context_tokens=[256, 512, 1024, 2048, 4096] if full else [256, 512, 1024, 2048],
        page_sizes=[1, 16, 32, 64, 128] if full else _of(profile, quick=[1, 16], history=[16]),
        commit_lengths=commit_lengths,
        attention_backends=["reference"],
    )


def rank_step_axes(profile: Profile, device: str) -> RankStepAxes:
    """Return the axes of the step of a served size: of `full` on a GPU only, no case elsewhere.

    Contexts are the incident's, its pages and its kernel among the others.
    """
    is_visited = profile.name == "full" and device == "cuda"
    return RankStepAxes(
        context_tokens=[1024, 8192, 32768, 65536, 131072, 189440] if is_visited else [],
        page_sizes=[1, 16, 64],
        cache_layouts=["paged", "hybrid"],
        commit_lengths=[1, 8],
        attention_backends=[*WALK_AND_SPLIT, "cuda"],
    )


def cut_step_axes(profile: Profile, device: str) -> RankStepAxes:
    """Return the axes of the step of the rank's first layers: on a GPU only, not in `history`.

    `quick` has the incident's probe, by its walk and by the kernel that took its place.
    """
    full = profile.name == "full"
    is_visited = profile.name != "history" and device == "cuda"
    contexts = [1024, 8192, 65536, 189440] if full else [65536]
    return RankStepAxes(
        context_tokens=contexts if is_visited else [],
        page_sizes=[1, 64] if full else [1],
        cache_layouts=["paged"],
        commit_lengths=[8],
        attention_backends=EVERY_KERNEL if full else WALK_AND_SPLIT,
    )


def chunk_axes(profile: Profile, device: str) -> PrefillAxes:
    """Return the axes of a rank's chunk of a prompt, which go with those of its cut step."""
    step = cut_step_axes(profile, device)
    return PrefillAxes(step.context_tokens, step.page_sizes, WALK_AND_SPLIT)


def prefill_axes(profile: Profile, device: str) -> PrefillAxes:
    """Return the axes of whole prompts of the trained pair, which only `full` has room for."""
    contexts = [1024, 4096, 16384] if device == "cuda" else [256, 1024, 4096]
    backends = ["triton_split"] if device == "cuda" else ["reference"]
    return PrefillAxes(contexts if profile.name == "full" else [], [1, 16, 64], backends)


def drafter_axes(profile: Profile, device: str) -> DrafterAxes:
    """Return the axes of the drafter's suite, which only `full` has room for.

    Contexts lie within the sliding window, beyond it, and beyond what YaRN was stretched from.
    """
    contexts = [256, 4096, 16384, 65536] if device == "cuda" else [256, 1024, 4096, 8192]
    visited = contexts if profile.name == "full" else []
    return DrafterAxes(visited, ["cached", "recomputed"], [0, 1024])


def moe_axes(profile: Profile, device: str) -> MoeAxes:
    """Return the axes of the experts' suite, which only `full` has room for."""
    if device == "cuda":
        num_tokens, backends = [1, 9, 17, 33, 65, 256, 1024], ["triton"]
    else:
        num_tokens, backends = [1, 9, 65], ["reference"]
    return MoeAxes(num_tokens if profile.name == "full" else [], backends)


def attention_axes(profile: Profile, device: str) -> AttentionAxes:
    """Return the axes of the attention suite; a backend that this GPU cannot run is skipped there.

    On a GPU at least four contexts, so that a line can be fitted over them. `quick` leaves page
    sizes, whose part is small, to `full`.
    """
    full = profile.name == "full"
    if device == "cuda":
        contexts = [1024, 16384, 65536, 189440]
        quick, history = [*WALK_AND_SPLIT, "cuda"], ["triton_split"]
        return AttentionAxes(
            context_tokens=sorted([*contexts, 4096, 32768, 131072]) if full else contexts,
            attention_backends=EVERY_KERNEL if full else _of(profile, quick=quick, history=history),
            page_sizes=[1, 16, 32, 64, 128] if full else [1],
        )
    return AttentionAxes(
        context_tokens=[1024, 2048, 4096, 8192] if full else [1024, 4096],
        attention_backends=["reference"],
        page_sizes=[1, 16, 32, 64, 128] if full else _of(profile, quick=[1, 64], history=[64]),
    )


def fp8_attention_axes(profile: Profile, device: str) -> AttentionAxes:
    """Return the axes of attention over fp8 rows, which only `full` has room for."""
    full = profile.name == "full"
    if device == "cuda":
        contexts, backends = [1024, 16384, 65536, 189440], ["triton_split", "cuda"]
    else:
        contexts, backends = [1024, 4096], ["reference"]
    return AttentionAxes(contexts if full else [], backends, [1, 64])


def generation_axes(profile: Profile) -> GenerationAxes:
    """Return the axes of the generation suite; they do not depend on the device.

    The cases of `quick` are the two texts whose commit lengths lie farthest apart; `history` has
    the first of them.
    """
    if profile.name == "full":
        return GenerationAxes(
            texts=["predictable", "code", "prose"],
            modes=["ddtree", "dflash", "ar"],
            temperatures=[0.0, 1.0],
            cache_layouts=["paged", "hybrid"],
        )
    texts = _of(profile, quick=["predictable", "prose"], history=["predictable"])
    return GenerationAxes(texts, ["ddtree"], [0.0], ["paged"])


def tree_axes(profile: Profile) -> TreeAxes:
    """Return the node budgets of the tree suites; they do not depend on the device."""
    if profile.name == "full":
        return TreeAxes(
            build_budgets=[8, 16, 64, 256, 512],
            accept_budgets=[16, 64, 512],
            compact_budgets=[16, 64, 512],
            page_sizes=[1, 16, 32, 64, 128],
        )
    return TreeAxes([64], [64], [64], [16])


def tree_op_budgets(profile: Profile) -> list[int]:
    """Return the node budgets of the tree's ops by themselves, which only `full` has room for."""
    return [16, 64, 256, 512] if profile.name == "full" else []


def ladder_axes(profile: Profile) -> LadderAxes:
    """Return the contexts of the ladder: of the incident's, the ends and the one of its probe.

    Only `full` has room for 14 variants, and fewer are no ladder.
    """
    return LadderAxes([1024, 65536, 189440] if profile.name == "full" else [])


PROFILE: Final = profile_named(os.environ.get(PROFILE_VARIABLE, "quick"))
