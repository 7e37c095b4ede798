"""How an op finds its backends: by name, part by part, imported when first asked for.

Knows no op.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.kernels.op import Backend


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
