"""How an op finds its backends, by name, part by part, imported when first asked for; its row.

Knows no op.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError
from engine.kernels.op import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from engine.kernels.op import Backend, Build, Kernel


def later(module: str, function: str) -> Callable[..., Any]:
    """Return a function of a module below `engine.kernels`, which the first call imports.

    Triton takes a good part of a second to import, and where there is no Triton the references
    work without it.
    """

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"engine.kernels.{module}"), function)(*arguments)

    return call


def backend_named(backends: Mapping[str, Backend], name: str, what: str) -> Backend:
    """Return a backend; an unknown one is a BackendError that names those there are."""
    found = backends.get(name)
    if found is None:
        raise BackendError(f"{what}: expected one of {', '.join(backends)}, got {name!r}")
    return found


def given(backend: str, what: str, part: Any) -> Any:
    """Return the part of a backend, or refuse one that has no such thing."""
    if part is None:
        raise BackendError(f"{what}: expected a backend that has such, got {backend!r}")
    return part


def op_of(
    call: Callable[..., Any],
    backends: Mapping[str, Backend],
    pose: Callable[..., Any],
    cases: ModuleType,
    *,
    beside: Mapping[str, Build] | None = None,
) -> Op[Any]:
    """Return the op table's row of a function that takes `backend`.

    `pose` checks the arguments of a call, `cases` is the module of the op's cases, and `beside`
    names what is compiled and measured but serves no call.
    """
    builds = {name: backend.build for name, backend in backends.items() if backend.build}
    builds |= beside or {}

    def kernels(name: str, arch: int, **arguments: Any) -> tuple[Kernel, ...]:
        build: Build = given(name, "kernels", builds.get(name))
        return build.kernels(pose(**arguments), arch)

    return Op(
        name=call.__name__,
        reference=partial(call, backend="reference"),
        implementations={name: partial(call, backend=name) for name in backends},
        archs={name: build.archs for name, build in builds.items()},
        kernels=kernels,
        cases=cases.CASES,
        production=cases.PRODUCTION,
        inputs=cases.inputs,
        cost=cases.cost,
        tolerance=cases.tolerance,
    )
