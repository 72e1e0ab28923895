"""Recurrent mixers as their papers and first implementations define them: one token, one head at a time.

Written without looking at the package's mixers or kernels and sharing nothing with them. `install` puts these in the
place of transformers' own, of which some versions compute the gated norm otherwise.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def convolved(inputs: list[Tensor], t: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Token t of a causal depthwise convolution; `weight` is `[D, 1, K]`."""
    width = weight.shape[2]
    total = torch.zeros_like(inputs[t]) if bias is None else bias.clone()
    for back in range(min(width, t + 1)):
        total = total + weight[:, 0, width - 1 - back] * inputs[t - back]
    return total


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of a vector."""
    normed = x / math.sqrt(float((x * x).mean()) + eps)
    return normed if weight is None else normed * weight


def unit(x: Tensor) -> Tensor:
    """A vector of length one, nearly."""
    return x / math.sqrt(float((x * x).sum()) + 1e-6)


def delta_step(state: Tensor, key: Tensor, value: Tensor, keep: Tensor, strength: Tensor) -> Tensor:
    """One step of the gated delta rule on a state `[Dk, Dv]`."""
    state = keep[:, None] * state
    recalled = key @ state
    return state + torch.outer(key, strength * (value - recalled))


def qwen3_next_parts(module: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor, Tensor]:
    """Queries and keys by key head, values, gates, b and a by value head."""
    together, two = module.in_proj_qkvz.weight @ x, module.in_proj_ba.weight @ x
    dk, dv, each = module.head_k_dim, module.head_v_dim, module.num_v_heads // module.num_k_heads
    queries, keys, values, gates, b, a = [], [], [], [], [], []
    for head in range(module.num_k_heads):
        mine = together[head * (2 * dk + 2 * each * dv) :]
        queries.append(mine[:dk])
        keys.append(mine[dk : 2 * dk])
        for i in range(each):
            values.append(mine[2 * dk + i * dv : 2 * dk + (i + 1) * dv])
            gates.append(mine[2 * dk + (each + i) * dv : 2 * dk + (each + i + 1) * dv])
            b.append(two[head * 2 * each + i])
            a.append(two[head * 2 * each + each + i])
    return queries, keys, values, torch.stack(gates), torch.stack(b), torch.stack(a)


def separate_parts(module: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor, Tensor]:
    """The same where each of them has a projection."""
    if hasattr(module, "in_proj_qkv"):
        mixed = module.in_proj_qkv.weight @ x
        gate, b, a = (getattr(module, f"in_proj_{name}").weight @ x for name in "zba")
    else:
        mixed = torch.cat([getattr(module, f"{name}_proj").weight @ x for name in "qkv"])
        gate, b, a = (getattr(module, f"{name}_proj").weight @ x for name in "gba")
    width = module.num_k_heads * module.head_k_dim
    queries, keys = mixed[:width].split(module.head_k_dim), mixed[width : 2 * width].split(module.head_k_dim)
    values = mixed[2 * width :].split(module.head_v_dim)
    return list(queries), list(keys), list(values), gate.view(module.num_v_heads, -1), b, a


def gated_delta_net(module: Any, sequence: Tensor) -> Tensor:
    """Qwen3-Next, Qwen3.5 and OLMo-Hybrid; `[T, H]`."""
    parts_of = qwen3_next_parts if hasattr(module, "in_proj_qkvz") else separate_parts
    norm, out = (module.norm, module.out_proj) if hasattr(module, "norm") else (module.o_norm, module.o_proj)
    dk, dv, heads = module.head_k_dim, module.head_v_dim, module.num_v_heads
    states = [torch.zeros(dk, dv) for _ in range(heads)]
    inputs, outputs = [], []
    for t, x in enumerate(sequence):
        queries, keys, values, gates, b, a = parts_of(module, x)
        inputs.append(torch.cat([*queries, *keys, *values]))
        mixed = silu(convolved(inputs, t, module.conv1d.weight, module.conv1d.bias))
        result = []
        for head in range(heads):
            source = head // (heads // module.num_k_heads)
            query = unit(mixed[source * dk : (source + 1) * dk]) / math.sqrt(dk)
            start = module.num_k_heads * dk
            key = unit(mixed[start + source * dk : start + (source + 1) * dk])
            value = mixed[2 * start + head * dv : 2 * start + (head + 1) * dv]
            keep = torch.exp(-torch.exp(module.A_log[head]) * softplus(a[head] + module.dt_bias[head]))
            strength = torch.sigmoid(b[head]) * (2 if getattr(module, "allow_neg_eigval", False) else 1)
            states[head] = delta_step(states[head], key, value, keep.expand(dk), strength)
            result.append(rms(query @ states[head], norm.weight, norm.variance_epsilon) * silu(gates[head]))
        outputs.append(out.weight @ torch.cat(result))
    return torch.stack(outputs)


def kimi_delta(module: Any, sequence: Tensor) -> Tensor:
    """Kimi Delta Attention; `[T, H]`."""
    size, heads, forget = module.head_dim, module.num_heads, module.forget_gate
    states = [torch.zeros(size, size) for _ in range(heads)]
    inputs, outputs = [], []
    for t, x in enumerate(sequence):
        inputs.append(torch.cat([getattr(module, f"{name}_proj").weight @ x for name in "qkv"]))
        queries, keys, values = silu(convolved(inputs, t, module.conv1d.weight, None)).split(heads * size)
        step = forget.f_b_proj.weight @ (forget.f_a_proj.weight @ x) + forget.dt_bias
        gate = module.g_b_proj.weight @ (module.g_a_proj.weight @ x)
        strength = torch.sigmoid(module.b_proj.weight @ x)
        result = []
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            keep = torch.exp(-torch.exp(forget.A_log.flatten()[head]) * softplus(step[mine]))
            states[head] = delta_step(states[head], unit(keys[mine]), values[mine], keep, strength[head])
            read = (unit(queries[mine]) / math.sqrt(size)) @ states[head]
            result.append(rms(read, module.o_norm.weight, module.o_norm.variance_epsilon) * torch.sigmoid(gate[mine]))
        outputs.append(module.o_proj.weight @ torch.cat(result))
    return torch.stack(outputs)


def linear(layer: Any, x: Tensor) -> Tensor:
    return layer.weight @ x if layer.bias is None else layer.weight @ x + layer.bias


def group_norm_gated(module: Any, y: Tensor, gate: Tensor) -> Tensor:
    """Mamba2's norm: gate, then each group on its own; Falcon-H1's may have no norm, or the gate last."""
    norm = module.norm
    if isinstance(norm, torch.nn.Identity):
        return y * silu(gate)
    last = bool(getattr(norm, "norm_before_gate", False))
    before = y if last else y * silu(gate)
    size = y.shape[0] // module.n_groups
    parts = [
        rms(before[g * size : (g + 1) * size], norm.weight[g * size : (g + 1) * size], norm.variance_epsilon)
        for g in range(module.n_groups)
    ]
    return torch.cat(parts) * silu(gate) if last else torch.cat(parts)


def mamba2(module: Any, sequence: Tensor) -> Tensor:
    """Mamba2 in all its dresses; `[T, H]`."""
    heads, size, groups, state = module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size
    width = heads * size
    low, high = module.time_step_limit
    states = [torch.zeros(size, state) for _ in range(heads)]
    inputs, outputs = [], []
    for t, x in enumerate(sequence):
        if hasattr(module, "mup_vector"):
            projected = linear(module.in_proj, x * module.ssm_in_multiplier) * module.mup_vector.flatten()
        else:
            projected = linear(module.in_proj, x)
        gate, step = projected[:width], projected[-heads:]
        inputs.append(projected[width:-heads])
        mixed = silu(convolved(inputs, t, module.conv1d.weight, module.conv1d.bias))
        result = []
        for head in range(heads):
            group = head // (heads // groups)
            value = mixed[head * size : (head + 1) * size]
            b = mixed[width + group * state : width + (group + 1) * state]
            c = mixed[width + (groups + group) * state : width + (groups + group + 1) * state]
            dt = softplus(step[head] + module.dt_bias[head]).clamp(low, high)
            keep = torch.exp(-torch.exp(module.A_log[head]) * dt)
            states[head] = keep * states[head] + torch.outer(dt * value, b)
            result.append(states[head] @ c + module.D[head] * value)
        outputs.append(linear(module.out_proj, group_norm_gated(module, torch.cat(result), gate)))
    return torch.stack(outputs)


def mamba1(module: Any, sequence: Tensor) -> Tensor:
    """Mamba, Falcon-Mamba and Jamba; `[T, H]`."""
    channels, state = module.A_log.shape
    rank = module.dt_proj.weight.shape[1]
    name = type(module).__name__
    hidden = torch.zeros(channels, state)
    inputs, outputs = [], []
    for t, x in enumerate(sequence):
        mixed, gate = linear(module.in_proj, x).chunk(2)
        inputs.append(mixed)
        mixed = silu(convolved(inputs, t, module.conv1d.weight, module.conv1d.bias))
        low, b, c = (module.x_proj.weight @ mixed).split([rank, state, state])
        if name == "FalconMambaMixer":
            low, b, c = (rms(part, None, module.rms_eps) for part in (low, b, c))
        elif name == "JambaMambaMixer":
            norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)
            low, b, c = (rms(p, n.weight, n.variance_epsilon) for p, n in zip((low, b, c), norms, strict=True))
        dt = softplus(linear(module.dt_proj, low))
        for channel in range(channels):
            keep = torch.exp(-torch.exp(module.A_log[channel]) * dt[channel])
            hidden[channel] = keep * hidden[channel] + dt[channel] * mixed[channel] * b
        outputs.append(linear(module.out_proj, (hidden @ c + module.D * mixed) * silu(gate)))
    return torch.stack(outputs)


def short_conv(module: Any, sequence: Tensor) -> Tensor:
    """LFM2's gated convolution; `[T, H]`."""
    inputs, outputs = [], []
    for t, x in enumerate(sequence):
        before, after, value = linear(module.in_proj, x).chunk(3)
        inputs.append(before * value)
        outputs.append(linear(module.out_proj, after * convolved(inputs, t, module.conv.weight, module.conv.bias)))
    return torch.stack(outputs)


REFERENCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "Qwen3_5GatedDeltaNet": gated_delta_net,
    "OlmoHybridGatedDeltaNet": gated_delta_net,
    "KimiLinearDeltaAttention": kimi_delta,
    "BambaMixer": mamba2,
    "FalconH1Mixer": mamba2,
    "GraniteMoeHybridMambaLayer": mamba2,
    "Mamba2Mixer": mamba2,
    "NemotronHMamba2Mixer": mamba2,
    "Zamba2MambaMixer": mamba2,
    "FalconMambaMixer": mamba1,
    "JambaMambaMixer": mamba1,
    "MambaMixer": mamba1,
    "Lfm2ShortConv": short_conv,
}


def install(model: Any) -> int:
    """Replace every recurrent module's forward; how many there are."""
    found = [module for module in model.modules() if type(module).__name__ in REFERENCES]
    for module in found:
        reference = REFERENCES[type(module).__name__]

        def forward(self: Any, hidden_states: Tensor, *_: Any, reference: Any = reference, **__: Any) -> Tensor:
            return torch.stack([reference(self, sequence) for sequence in hidden_states])

        module.forward = types.MethodType(forward, module)
    return len(found)
