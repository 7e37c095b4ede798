"""Keys and values of new context rows for all layers of a drafter at once.

Every layer projects the same features, so that one product with all their matrices does, where
each by itself would be a launch for a few rows. Norm and rotation are those of
`DrafterLayer.keys_and_values`, its slow twin, but nothing is rounded between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.drafter_layer import DrafterLayer
from engine.layers import Rotation, accumulation_dtype, rotate_half_split


@dataclass(frozen=True, slots=True, eq=False)
class ContextProjection:
    """The matrices of a drafter's layers that read features, copied behind each other."""

    weight: Tensor  # [layers * 2 * H_kv * head_dim, hidden], a layer's keys, then its values
    norms: Tensor  # [layers, 1, head_dim], of keys, in the accumulation dtype
    eps: float

    @classmethod
    def of(cls, layers: Sequence[DrafterLayer]) -> "ContextProjection":
        """Copy the matrices of `layers`, which are all of one drafter."""
        norms = torch.stack([layer.k_norm for layer in layers]).unsqueeze(1)
        return cls(
            torch.cat([matrix for layer in layers for matrix in (layer.k_proj, layer.v_proj)]),
            norms.to(accumulation_dtype(norms.dtype)),
            layers[0].config.rms_norm_eps,
        )

    def __call__(self, features: Tensor, rotation: Rotation) -> Tensor:
        """Return the context rows `[value ; key]` of `features` [M, hidden].

        Returns
        -------
        Tensor
            [layers, M, H_kv, 2 * head_dim], contiguous.
        """
        layers, _, head_dim = self.norms.shape
        projected = functional.linear(features, self.weight)
        both = projected.view(len(features), layers, 2, -1, head_dim)
        keys = functional.rms_norm(both[:, :, 0].to(self.norms.dtype), (head_dim,), eps=self.eps)
        keys = rotate_half_split(keys * self.norms, rotation).to(features.dtype)
        return torch.cat((both[:, :, 1].transpose(0, 1), keys.transpose(0, 1)), dim=-1)
