"""Buffers of recurrent modules that are computed from the configuration and not stored in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rebuild_state_buffers(module: Any, config: Any, device: torch.device) -> bool:
    """Fill a recurrent module's computed buffers in place.

    Args:
        module: Any module with buffers on the meta device.
        config: The model's configuration.
        device: Where the buffers go.

    Returns:
        Whether the module is one that is known here.
    """
    if hasattr(module, "mup_vector"):
        module.mup_vector = _projection_multipliers(module, config).to(device)
        return True
    if type(module).__name__ == "FalconMambaWeightlessRMSNorm":
        module.weight = torch.ones(module.weight.shape, dtype=module.weight.dtype, device=device)
        return True
    return False


def _projection_multipliers(module: Any, config: Any) -> Tensor:
    """`[1, 1, P]`: a multiplier for each part of Falcon-H1's projection: gate, x, B, C and step size."""
    width, state = module.intermediate_size, module.n_groups * module.ssm_state_size
    sizes = (width, width, state, state, module.num_heads)
    parts = [torch.full((size,), float(scale)) for size, scale in zip(sizes, config.ssm_multipliers, strict=True)]
    return torch.cat(parts).to(module.mup_vector.dtype)[None, None]
