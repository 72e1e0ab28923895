"""Mamba (arXiv 2312.00752): convolution, a selective scan with a decay per channel and state, gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from specround.contract import SpecLimit
from specround.models.recurrent.layer import StateShape
from specround.models.recurrent.mixer import Mixer
from specround.models.recurrent.norm import rms_norm

PLAIN_DECODING = SpecLimit("none", "a Mamba1 state has no kernel that verifies more than one token")
"""Limit of a mixer that only steps."""


class MambaMixer(Mixer):
    """E channels with S states each; the step size is a low-rank projection of the convolved input."""

    replaces = ("MambaMixer",)
    verifies = PLAIN_DECODING

    @property
    def shape(self) -> StateShape:
        """See the base class."""
        channels, state = self.module.A_log.shape
        return StateShape(
            op="mamba1",
            conv_channels=self.module.conv1d.weight.shape[0],
            conv_width=self.module.conv1d.weight.shape[2],
            num_heads=channels,
            num_key_heads=1,
            key_dim=state,
            value_dim=1,
        )

    def selectors(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Low-rank step size `[N, rank]`, B and C `[N, S]`, of convolved inputs `[N, E]`."""
        state = self.module.A_log.shape[1]
        rank = self.module.dt_proj.weight.shape[1]
        step, b, c = self.module.x_proj(mixed).split([rank, state, state], -1)
        return step, b, c

    def mix(self, x: Tensor) -> Tensor:
        """See the base class."""
        module, conv = self.module, self.module.conv1d
        mixed, gate = module.in_proj(x).chunk(2, -1)
        mixed = module.act(self.ops.convolve(mixed, conv.weight[:, 0], conv.bias)).to(x.dtype)
        step, b, c = self.selectors(mixed)
        wide = functional.linear(step.to(x.dtype), module.dt_proj.weight).float() + module.dt_proj.bias.float()
        y = self.ops.selective_scan(
            mixed.float(),
            functional.softplus(wide),
            -module.A_log.float().exp(),
            b.float(),
            c.float(),
            module.D.float(),
        )
        out: Tensor = module.out_proj((y * functional.silu(gate.float())).to(x.dtype))
        return out


class FalconMambaMixer(MambaMixer):
    """With a norm without weights on step size, B and C."""

    replaces = ("FalconMambaMixer",)
    verifies = PLAIN_DECODING

    def selectors(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See the base class."""
        step, b, c = super().selectors(mixed)
        eps = self.module.rms_eps
        return rms_norm(step, None, eps), rms_norm(b, None, eps), rms_norm(c, None, eps)


class JambaMixer(MambaMixer):
    """With a norm on step size, B and C."""

    replaces = ("JambaMambaMixer",)
    verifies = PLAIN_DECODING

    def selectors(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See the base class."""
        step, b, c = super().selectors(mixed)
        module = self.module
        norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)
        normed = [rms_norm(x, norm.weight, norm.variance_epsilon) for x, norm in zip((step, b, c), norms, strict=True)]
        return normed[0], normed[1], normed[2]
