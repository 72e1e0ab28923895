"""The Triton tree attention on the cases of the naive op's tests."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from attention_cases import Case, Request, Setting, build, chunk, masked, tree
from state_device import moved
from torch import Tensor

from specround.kernels.tree_attention.launch import LaunchShape
from specround.kernels.tree_attention.rows import AttentionRows, lay_out_rows
from specround.kernels.tree_attention.triton import tree_attention

DEEP = [-1] + [max(0, c - 2) for c in range(1, 20)]
BUSHY = [-1, 0, 0, 0, 2, 2, 4, 1]


def launch(rows: int = 16, keys: int = 16, splits: int = 1, stages: int = 2) -> LaunchShape:
    """A launch with small tiles, so that small cases have many of them."""
    return LaunchShape(block_rows=rows, block_keys=keys, num_splits=splits, num_warps=4, num_stages=stages)


def mixed_case(setting: Setting, seed: int = 3) -> Case:
    """A prompt chunk, a deep tree, a chain, a bushy tree and a mask, ragged."""
    batch = [chunk(5, 11), tree(21, DEEP), chunk(9, 4, unused=1), tree(6, BUSHY, unused=5)]
    return build([*batch, masked(13, 12, random.Random(seed))], setting, seed)


def idle_case(setting: Setting) -> Case:
    """Requests without rows at the ends and between others."""
    idle = Request([], 3, [0, 1, 2])
    return build([idle, idle, chunk(5, 3), idle, tree(6, BUSHY), idle], setting, 4)


def rows_of(case: Case, **changes: object) -> AttentionRows:
    """The rows of a case; `changes` replace parts of the row context."""
    bounds = [len(request.key_positions) + place % 3 for place, request in enumerate(case.requests)]
    return lay_out_rows(case.num_rows, bounds, replace(case.context, **changes))


def run(case: Case, device: torch.device, shape: LaunchShape | None = None, **changes: object) -> Tensor:
    """The op on a device, its result on the CPU."""
    return attend(case, rows_of(case, **changes), device, shape)


def attend(case: Case, rows: AttentionRows, device: torch.device, shape: LaunchShape | None = None) -> Tensor:
    """The op on rows that are laid out already."""
    there = moved(replace(case, context=rows.context), device)
    rows = AttentionRows(there.context, rows.counts, rows.bounds)
    found = tree_attention(
        there.query,
        there.key_cache,
        there.value_cache,
        rows,
        scale=case.scale,
        window=case.setting.window,
        sinks=there.sinks,
        softcap=case.setting.softcap,
        shape=shape,
    )
    assert "groups" not in vars(rows), "no mask is made"
    return found.cpu()
