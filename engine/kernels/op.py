"""The records an op of the engine is described by: what it computes, costs and is tested on.

Owns the vocabulary of the op table. Knows no op and imports no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping


@dataclass(frozen=True, slots=True)
class Cost:
    """What a case cannot do without: bytes that must move, arithmetic that must happen."""

    bytes: int  # each operand moved once, cached latent rows included
    flops: int  # multiply and add count as two
    kv_bytes: int = 0  # the part of `bytes` that is cached latent rows


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an implementation may stray from the reference, and why that far."""

    output_rel: float  # ‖out - reference‖ / ‖reference‖ of one output row
    lse_abs: float  # |lse - reference|, natural log
    reason: str


@dataclass(frozen=True, slots=True)
class Case:
    """One problem an op is tested on; ops add its sizes."""

    name: str
    reason: str  # what this case alone would catch


@dataclass(frozen=True, slots=True)
class Binary:
    """A kernel compiled for one architecture."""

    cubin: bytes
    shared_bytes: int  # of one block, asked for at the launch


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as a backend launches it for given arguments on one architecture."""

    name: str  # of the function
    arch: int  # 90 is sm_90
    key: Hashable  # equal where the code differs at most in what it knows of integer arguments
    compile: Callable[[], Binary]  # needs no device


@dataclass(frozen=True, slots=True)
class Build:
    """What of an op can be compiled for machines that are not here."""

    archs: tuple[int, ...]  # that its kernels are made for
    kernels: Callable[[Any, int], tuple[Kernel, ...]]  # of a checked problem on one of them


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op: all the op table has to know; functions of a checked problem."""

    run: Callable[[Any], None]  # writes the problem's outputs
    build: Build | None = None  # None: it has no kernels and runs wherever PyTorch does
    programs: Callable[[Any], int] | None = None  # of the kernel that reads the rows
    num_splits: Callable[[Any], int] | None = None  # by default; None: it does not split
    workspace_size: Callable[[Any], int] | None = None  # float32 numbers; None: it takes none


CaseT = TypeVar("CaseT", bound=Case)


@dataclass(frozen=True, slots=True)
class Op(Generic[CaseT]):
    """One row of the op table.

    `reference` is the definition; every entry of `implementations` (the reference among them)
    takes the same arguments and owes the same result within `tolerance(dtype)`.
    `inputs(case, device=…, dtype=…)` gives these arguments by name, the same for the same seed.
    `kernels(name, arch, **arguments)` gives what an entry of `archs` launches for them: an
    implementation, or what is only measured beside them. Every kernel can so be compiled for
    machines that are not here; `production` holds the cases whose kernels must fit them.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Callable[..., Any]]
    archs: Mapping[str, tuple[int, ...]]  # of all that has kernels; 90 is sm_90
    kernels: Callable[..., tuple[Kernel, ...]]
    cases: tuple[CaseT, ...]
    production: tuple[CaseT, ...]
    inputs: Callable[..., dict[str, Any]]
    cost: Callable[..., Cost]
    tolerance: Callable[..., Tolerance]
