"""Keys and values of new context rows for all layers of a drafter at once.

Every layer projects the same features, so that one product with all their matrices does, where
each by itself would be a launch for a few rows. What is made of them then is `keep_rows`;
`DrafterLayer.keys_and_values` is the slow twin of both, but rounds between norm and rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.drafter_layer import DrafterLayer


@dataclass(frozen=True, slots=True, eq=False)
class ContextProjection:
    """The matrices of a drafter's layers that read features, copied behind each other."""

    weight: Tensor  # [layers * 2 * H_kv * head_dim, hidden], a layer's keys, then its values
    num_layers: int
    head_dim: int

    @classmethod
    def of(cls, layers: Sequence[DrafterLayer]) -> "ContextProjection":
        """Copy the matrices of `layers`, which are all of one drafter."""
        weight = torch.cat([one for layer in layers for one in (layer.k_proj, layer.v_proj)])
        return cls(weight, len(layers), layers[0].config.head_dim)

    def __call__(self, features: Tensor) -> Tensor:
        """Project `features` [M, hidden].

        Returns
        -------
        Tensor
            [layers, 2, M, H_kv, head_dim], keys and values of each layer, a view.
        """
        projected = functional.linear(features, self.weight)
        shape = (len(features), self.num_layers, 2, -1, self.head_dim)
        return projected.view(shape).permute(1, 2, 0, 3, 4)
