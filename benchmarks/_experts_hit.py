"""How many experts the rows of a pass chose: a floor holds what is read, not what could have been.

Rows that agree read fewer experts than rows that choose independently, and a floor of the latter
would flatter a step of the former.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from benchmarks._identity import SuiteError
from engine import Engine, Snapshot, StepBatch, TargetConfig
from engine.moe import chosen_experts


def hit_by_layer(chosen: Sequence[Tensor], config: TargetConfig) -> tuple[int, ...]:
    """Return the distinct experts of each layer that has some, over all passes in `chosen`."""
    num_layers = config.num_hidden_layers - config.first_k_dense_replace
    if not chosen or len(chosen) % num_layers:
        raise SuiteError(
            f"experts: expected choices of {num_layers} layers a pass, got {len(chosen)} in all"
        )
    return tuple(
        len({expert for ids in chosen[layer::num_layers] for expert in ids[ids >= 0].tolist()})
        for layer in range(num_layers)
    )


def mean_hit(chosen: Sequence[Tensor], config: TargetConfig) -> float:
    """Return the distinct experts of a layer, the mean: what a floor asks for."""
    hits = hit_by_layer(chosen, config)
    return sum(hits) / len(hits)


def step_choices(engine: Engine, batch: StepBatch, snapshot: Snapshot) -> list[Tensor]:
    """Run the step behind `snapshot` once and return what its rows chose, layer by layer.

    Its verify pass runs launch by launch, whatever the engine does: a replay chooses unheard.
    """
    launched = Engine(engine.target, engine.drafter, replace(engine.config, graphs="off"))
    engine.rewind(batch, snapshot)
    trees = engine.build(batch, engine.draft(batch))
    with chosen_experts() as chosen:
        verified = launched.verify(batch, trees)
    engine.commit(batch, trees, verified)
    return chosen
