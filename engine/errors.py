"""Every error the engine raises on purpose, as one tree.

::

    EngineError
    ├── ConfigError         a configuration that no engine can be built from
    ├── BudgetError         a node budget outside its range
    ├── ShapeError          a tensor of the wrong shape or dtype, or with values that cannot be used
    ├── CacheError          the paged cache was asked for, or found in, an impossible state
    │   └── OutOfPagesError     no free page is left; the cache is as it was before the call
    ├── BackendError        an implementation that does not exist or cannot run here
    ├── WeightsError        a checkpoint that is missing, damaged or of another model
    └── RequestError        a prompt or a sampling parameter that cannot be served

Messages read `what: expected X, got Y (why it matters or where X came from)`.
Anything else that leaves the engine is a defect of the engine.
"""


class EngineError(Exception):
    """Root of all errors the engine raises on purpose."""


class ConfigError(EngineError):
    """A configuration that no engine can be built from."""


class BudgetError(EngineError):
    """A node budget outside its range."""


class ShapeError(EngineError):
    """A tensor of the wrong shape or dtype, or with values that cannot be used."""


class CacheError(EngineError):
    """The paged cache was asked for, or found in, an impossible state."""


class OutOfPagesError(CacheError):
    """No free page is left; the cache is as it was before the call."""


class BackendError(EngineError):
    """An implementation that does not exist or cannot run here."""


class WeightsError(EngineError):
    """A checkpoint that is missing, damaged or of another model."""


class RequestError(EngineError):
    """A prompt or a sampling parameter that cannot be served."""
