"""Gated DeltaNet (arXiv 2412.06464): convolution, gated delta rule, then a norm that is gated after it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from specround.models.recurrent.layer import StateShape
from specround.models.recurrent.mixer import TREES, Mixer
from specround.models.recurrent.norm import gated_rms_norm, l2_norm

_L2_EPS = 1e-6


class _GatedDeltaNet(Mixer):
    """What all Gated DeltaNets share; subclasses say how the projections are laid out.

    With Hk key heads of Dk elements and Hv value heads of Dv: the state of a value head decays by
    `exp(-exp(A) softplus(a + dt_bias))` and takes in `beta = sigmoid(b)` of what its key does not yet recall.
    """

    verifies = TREES

    @property
    def shape(self) -> StateShape:
        """See the base class."""
        module, weight = self.module, self.module.conv1d.weight
        return StateShape(
            op="gdn",
            conv_channels=weight.shape[0],
            conv_width=weight.shape[2],
            num_heads=module.A_log.shape[0],
            num_key_heads=module.num_k_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
        )

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values `[N, 2 Hk Dk + Hv Dv]`, gates `[N, Hv Dv]`, b and a `[N, Hv]`, of `[N, H]`."""

    @abstractmethod
    def finish(self, rule: Tensor, gate: Tensor) -> Tensor:
        """Norm, gate and output projection: `[N, Hv, Dv]` float32 and `[N, Hv, Dv]` to `[N, H]`."""

    def write_strength(self, b: Tensor) -> Tensor:
        """How much of a correction is written, `[N, Hv]` float32."""
        return b.float().sigmoid()

    def mix(self, x: Tensor) -> Tensor:
        """See the base class."""
        module = self.module
        mixed, gate, b, a = self.project(x)
        mixed = ACT2FN[module.activation](self.ops.convolve(mixed, module.conv1d.weight[:, 0], module.conv1d.bias))
        query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        heads = (-1, module.head_k_dim)
        rule = self.ops.delta_rule(
            l2_norm(query.unflatten(-1, heads), _L2_EPS) * module.head_k_dim**-0.5,
            l2_norm(key.unflatten(-1, heads), _L2_EPS),
            value.unflatten(-1, (-1, module.head_v_dim)).float(),
            -module.A_log.float().exp() * functional.softplus(a.float() + module.dt_bias.float()),
            self.write_strength(b),
        )
        return self.finish(rule, gate.reshape(rule.shape))


class Qwen3NextMixer(_GatedDeltaNet):
    """Projections interleaved by key head: its query, key, values and gates together; likewise b and a."""

    replaces = ("Qwen3NextGatedDeltaNet",)
    verifies = TREES

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the base class."""
        module = self.module
        per_key = module.num_v_heads // module.num_k_heads
        sizes = [module.head_k_dim, module.head_k_dim, per_key * module.head_v_dim, per_key * module.head_v_dim]
        by_key_head = module.in_proj_qkvz(x).unflatten(-1, (module.num_k_heads, -1)).split(sizes, -1)
        query, key, value, gate = (part.flatten(-2) for part in by_key_head)
        b, a = (part.flatten(-2) for part in module.in_proj_ba(x).unflatten(-1, (module.num_k_heads, -1)).chunk(2, -1))
        return torch.cat([query, key, value], -1), gate, b, a

    def finish(self, rule: Tensor, gate: Tensor) -> Tensor:
        """See the base class."""
        norm = self.module.norm
        normed = gated_rms_norm(rule, gate, norm.weight, norm.variance_epsilon, order="norm first")
        out: Tensor = self.module.out_proj(normed.flatten(-2).to(gate.dtype))
        return out


class Qwen35Mixer(Qwen3NextMixer):
    """A projection each for queries, keys and values together, gates, b and a."""

    replaces = ("Qwen3_5GatedDeltaNet",)
    verifies = TREES

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the base class."""
        module = self.module
        return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)


class OlmoHybridMixer(_GatedDeltaNet):
    """All projections apart; corrections may overshoot, which gives the state negative eigenvalues."""

    replaces = ("OlmoHybridGatedDeltaNet",)
    verifies = TREES

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the base class."""
        module = self.module
        mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        return mixed, module.g_proj(x), module.b_proj(x), module.a_proj(x)

    def write_strength(self, b: Tensor) -> Tensor:
        """See the base class."""
        strength = b.float().sigmoid()
        return strength * 2.0 if self.module.allow_neg_eigval else strength

    def finish(self, rule: Tensor, gate: Tensor) -> Tensor:
        """See the base class."""
        norm = self.module.o_norm
        normed = gated_rms_norm(rule, gate, norm.weight, norm.variance_epsilon, order="norm first")
        out: Tensor = self.module.o_proj(normed.flatten(-2).to(gate.dtype))
        return out
