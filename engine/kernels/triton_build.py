"""Triton kernels compiled for machines that are not here, from the arguments of a launch.

Types and promises of a binary are those Triton itself would take from these arguments: a pointer
has the tensor's dtype, an integer 32 bits unless it needs 64, an integer of 1 is a constant, and
pointers and integers divisible by 16 are known to be. Knows no op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.op import Binary, Kernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALIGNMENT = 16
WARP_SIZE = 32
_OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "launch_pdl",
)  # of the compiler, not the kernel
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def chained(*, is_chained: bool) -> dict[str, Any]:
    """Say to a kernel and its compiler whether it may start before the launch ahead has ended."""
    return {"IS_CHAINED": is_chained} | ({"launch_pdl": True} if is_chained else {})


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """What one of an op's launches is made of."""

    function: Any  # under `triton.jit`
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]  # constants and the compiler's options

    def start(self) -> None:
        """Queue it on the current device."""
        self.function[self.grid](*self.arguments, **self.meta)

    def kernel(self, arch: int) -> Kernel:
        """Return its kernel, ready to be compiled for an architecture."""
        return triton_kernel(self.function, self.arguments, self.meta, arch)


def triton_kernel(
    function: Any, arguments: Sequence[Any], meta: Mapping[str, Any], arch: int
) -> Kernel:
    """Describe what `function[grid](*arguments, **meta)` launches on an architecture.

    Parameters
    ----------
    function : a function under `triton.jit`
    arguments : sequence of Tensor, int, float, bool or None
        The positional arguments, in the kernel's order.
    meta : mapping of str
        Constants and the compiler's options, as they are given by keyword.
    arch : int
        90 is sm_90.
    """
    options = {name: value for name, value in meta.items() if name in _OPTIONS}
    constants = {name: value for name, value in meta.items() if name not in _OPTIONS}
    signature: dict[str, str] = {}
    aligned: list[int] = []
    names = [name for name in function.arg_names if name not in constants]
    for name, value in zip(names, arguments, strict=True):
        if value is None or (type(value) is int and value == 1):
            constants[name] = value
            continue
        signature[name] = _type_of(value)
        if _is_aligned(value):
            aligned.append(function.arg_names.index(name))
    # The compiler wants the types in the order of the kernel's parameters.
    types = {name: signature.get(name, "constexpr") for name in function.arg_names}

    def compile_() -> Binary:
        hints = {(index,): [["tt.divisibility", ALIGNMENT]] for index in aligned}
        source = ASTSource(function, types, constants, hints)
        target = GPUTarget("cuda", arch, WARP_SIZE)
        compiled = triton.compile(source, target=target, options=options)
        return Binary(compiled.asm["cubin"], compiled.metadata.shared)

    pointers = tuple(item for item in signature.items() if item[1].startswith("*"))
    key = (pointers, tuple(sorted(meta.items())))
    return Kernel(function.__name__, arch, key, compile_)


def _type_of(value: Any) -> str:
    """Return the type a runtime argument has in a kernel, in Triton's words."""
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _is_aligned(value: Any) -> bool:
    """Return whether the compiler may take a pointer or an integer to be divisible by 16."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return type(value) is int and value % ALIGNMENT == 0
