"""A DDTree speculative-decoding engine: what a target would say, several tokens a step.

`decoder.py` is the file to read first. The names below are the engine's public ones; kernels have
their own in `engine.kernels`.
"""

from engine.batch import Snapshot, StepBatch, StepResult
from engine.budget import CostOrigin, CostTable
from engine.calibration import measure_costs
from engine.config import DrafterConfig, EngineConfig, TargetConfig, YarnConfig
from engine.cost import StepShape, resident_bytes, stage_costs, step_bytes
from engine.decoder import Engine
from engine.draft_tree import (
    Acceptance,
    DraftTree,
    accept,
    accept_batch,
    build_draft_tree,
    build_from_log_probs,
    chain_tree,
    root_tree,
)
from engine.drafter import Drafter, DraftModel
from engine.errors import (
    BackendError,
    BudgetError,
    CacheError,
    ConfigError,
    EngineError,
    OutOfPagesError,
    RequestError,
    ShapeError,
    WeightsError,
)
from engine.observer import STAGES, StageClock, StageObserver
from engine.planted import PlantedDrafter, PlantedTarget, begin_planted, record_continuation
from engine.presets import Preset, preset, sample_text
from engine.sampling import Sampling
from engine.sequence import Generation
from engine.target import Target
from engine.weights import load_drafter, load_target, save_drafter, save_target

__all__ = [
    "STAGES",
    "Acceptance",
    "BackendError",
    "BudgetError",
    "CacheError",
    "ConfigError",
    "CostOrigin",
    "CostTable",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Generation",
    "OutOfPagesError",
    "PlantedDrafter",
    "PlantedTarget",
    "Preset",
    "RequestError",
    "Sampling",
    "ShapeError",
    "Snapshot",
    "StageClock",
    "StageObserver",
    "StepBatch",
    "StepResult",
    "StepShape",
    "Target",
    "TargetConfig",
    "WeightsError",
    "YarnConfig",
    "accept",
    "accept_batch",
    "begin_planted",
    "build_draft_tree",
    "build_from_log_probs",
    "chain_tree",
    "load_drafter",
    "load_target",
    "measure_costs",
    "preset",
    "record_continuation",
    "resident_bytes",
    "root_tree",
    "sample_text",
    "save_drafter",
    "save_target",
    "stage_costs",
    "step_bytes",
]
