"""Mamba2 (arXiv 2405.21060): convolution, a state space with one decay per head, gate, norm."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from specround.models.recurrent.layer import StateShape
from specround.models.recurrent.mixer import TREES, Mixer
from specround.models.recurrent.norm import gated_rms_norm


class Mamba2Mixer(Mixer):
    """H heads of P elements, whose B and C of S elements are shared by the heads of a group.

    The step size is clamped to the module's limits for every row. transformers clamps it in prompts and not in single
    steps, so that its own decoding disagrees with its own prefill where a limit is reached.
    """

    replaces: ClassVar[tuple[str, ...]] = (
        "BambaMixer",
        "GraniteMoeHybridMambaLayer",
        "Mamba2Mixer",
        "NemotronHMamba2Mixer",
        "Zamba2MambaMixer",
    )
    verifies = TREES

    @property
    def shape(self) -> StateShape:
        """See the base class."""
        module, weight = self.module, self.module.conv1d.weight
        return StateShape(
            op="mamba2",
            conv_channels=weight.shape[0],
            conv_width=weight.shape[2],
            num_heads=module.A_log.shape[0],
            num_key_heads=module.n_groups,
            key_dim=module.ssm_state_size,
            value_dim=module.head_dim,
        )

    def project(self, x: Tensor) -> Tensor:
        """Gates, convolution inputs and step sizes side by side, `[N, ...]`, of `[N, H]`."""
        projected: Tensor = self.module.in_proj(x)
        return projected

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate, then norm per group: `[N, I]` float32, of `[N, I]` each."""
        norm = self.module.norm
        return gated_rms_norm(
            y, gate, norm.weight, norm.variance_epsilon, order="gate first", groups=self.module.n_groups
        )

    def mix(self, x: Tensor) -> Tensor:
        """See the base class."""
        module, conv = self.module, self.module.conv1d
        width, state = module.num_heads * module.head_dim, module.n_groups * module.ssm_state_size
        gate, mixed, step = torch.split(self.project(x), [width, width + 2 * state, module.num_heads], -1)
        mixed = module.act(self.ops.convolve(mixed, conv.weight[:, 0], conv.bias)).float()
        value, b, c = mixed.split([width, state, state], -1)
        lowest, highest = module.time_step_limit
        y = self.ops.selective_state(
            value.unflatten(-1, (-1, module.head_dim)),
            functional.softplus(step.float() + module.dt_bias.float()).clamp(lowest, highest),
            -module.A_log.float().exp(),
            b.unflatten(-1, (module.n_groups, -1)),
            c.unflatten(-1, (module.n_groups, -1)),
            module.D.float(),
        )
        out: Tensor = module.out_proj(self.gated(y.flatten(-2), gate).to(x.dtype))
        return out


class FalconH1Mixer(Mamba2Mixer):
    """With multipliers on the input and on each part of the projection, and an optional norm in either order."""

    replaces = ("FalconH1Mixer",)
    verifies = TREES

    def project(self, x: Tensor) -> Tensor:
        """See the base class."""
        projected: Tensor = self.module.in_proj(x * self.module.ssm_in_multiplier) * self.module.mup_vector[0]
        return projected

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and norm in the order of the configuration, or a gate alone."""
        norm: Any = self.module.norm
        if isinstance(norm, nn.Identity):
            return y * functional.silu(gate.float())
        return gated_rms_norm(
            y,
            gate,
            norm.weight,
            norm.variance_epsilon,
            order="norm first" if norm.norm_before_gate else "gate first",
            groups=self.module.n_groups,
        )
