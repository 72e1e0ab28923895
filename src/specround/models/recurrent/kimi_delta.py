"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay for each element of the key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from specround.models.recurrent.layer import StateShape
from specround.models.recurrent.mixer import TREES, Mixer
from specround.models.recurrent.norm import gated_rms_norm, l2_norm

_L2_EPS = 1e-6


class KimiDeltaMixer(Mixer):
    """Convolution, delta rule, norm, then a sigmoid gate; H heads of D elements for queries, keys and values."""

    replaces = ("KimiLinearDeltaAttention",)
    verifies = TREES

    @property
    def shape(self) -> StateShape:
        """See the base class."""
        module, weight = self.module, self.module.conv1d.weight
        return StateShape(
            op="kda",
            conv_channels=weight.shape[0],
            conv_width=weight.shape[2],
            num_heads=module.num_heads,
            num_key_heads=module.num_heads,
            key_dim=module.head_dim,
            value_dim=module.head_dim,
        )

    def mix(self, x: Tensor) -> Tensor:
        """See the base class."""
        module, heads = self.module, (-1, self.module.head_dim)
        mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        mixed = ACT2FN[module.activation](self.ops.convolve(mixed, module.conv1d.weight[:, 0], module.conv1d.bias))
        query, key, value = (part.unflatten(-1, heads) for part in mixed.chunk(3, -1))
        rule = self.ops.delta_rule(
            l2_norm(query, _L2_EPS) * module.head_dim**-0.5,
            l2_norm(key, _L2_EPS),
            value.float(),
            self._log_decay(x),
            module.b_proj(x).float().sigmoid(),
        )
        gate = module.g_b_proj(module.g_a_proj(x)).unflatten(-1, heads)
        norm = module.o_norm
        normed = gated_rms_norm(
            rule, gate, norm.weight, norm.variance_epsilon, order="norm first", activation=torch.sigmoid
        )
        out: Tensor = module.o_proj(normed.flatten(-2).to(x.dtype))
        return out

    def _log_decay(self, x: Tensor) -> Tensor:
        """`[N, H, D]` float32."""
        forget = self.module.forget_gate
        step = forget.f_b_proj(forget.f_a_proj(x)).float() + forget.dt_bias.float()
        rate: Tensor = forget.A_log.float().exp().view(-1, 1)
        return -rate * functional.softplus(step.unflatten(-1, (rate.shape[0], -1)))
