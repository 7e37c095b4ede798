"""The identity of a suite: what its class, its one timed method and its version are called.

asv and the sidecar must mean the same case, so both names come from here. Imports no torch.
"""

from dataclasses import dataclass


class SuiteError(Exception):
    """A suite that does not keep the rules of these modules."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of a suite, as asv has them."""

    method: str
    benchmark: str  # module below benchmarks/, class and method

    @classmethod
    def of(cls, suite: type) -> "Identity":
        """Name a suite; refuse one without its own version or with more than one timed method."""
        if "version" not in vars(suite):
            raise SuiteError(
                f"{suite.__name__}.version: expected an explicit version, got none "
                "(without one, asv takes the text of the code)"
            )
        method = _only_timed_method(suite)
        modules = suite.__module__.split(".")[1:]
        return cls(method, ".".join([*modules, suite.__name__, method]))


def _only_timed_method(suite: type) -> str:
    """Return the name of the one `time_*` method; the sidecar knows a case by its class."""
    methods = [name for name in dir(suite) if name.startswith("time_")]
    if len(methods) != 1:
        raise SuiteError(f"{suite.__name__}: expected one time_* method, got {methods}")
    return methods[0]
