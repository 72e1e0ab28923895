"""The draft host runs a draft module of one's own: shared weights, paged KV, windows, trees grown level by level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_drafter import EMBEDDING, HEADS, LAYERS, WINDOWS, AttentionDrafter, Counting, Row
from plain_reference import Ask, PlainReference, check_at_rest

from specround import LLM
from specround.contract import ConfigError

ASKS = [Ask((5, 3, 9, 7, 4, 8, 11, 2, 6), 15), Ask((7, 7, 1), 17, 0.9, 3), Ask((4,), 14)]
K = 6
LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])


def build(target: PlainReference, **values: Any) -> LLM:
    settings = {name: values.pop(name) for name in ("async_scheduling", "max_num_batched_tokens") if name in values}
    speculation = {"method": "attention_drafter", "num_speculative_tokens": K, **values}
    return LLM(target.path, speculation, max_model_len=48, block_size=4, max_num_seqs=3, **settings)


def generate(llm: LLM) -> None:
    llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    check_at_rest(llm)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def context_of(view: Any, r: int) -> tuple[int, ...]:
    """Committed tokens of a request, its new root excluded."""
    count = int(view.num_computed_tokens[r])
    return tuple(view.token_history[int(view.req_idx[r]), :count].tolist())


class TreeGrower:
    """Drafts a tree in four calls over the absorbed context and compares every row with the dense reference.

    Per request: the root; one or two children and a padding row among them; grandchildren under both, in falling
    order of their slots; a great-grandchild. Requests have different numbers of rows.
    """

    llm: LLM

    def __init__(self) -> None:
        self.rows = 0
        self.padded = 0

    def __call__(self, drafter: AttentionDrafter, view: Any) -> None:
        self._check_absorbed(drafter, view)
        # a request has slots up to its limit
        limits = self.llm.engine.core.runner.state.limits[view.req_idx]
        fits = (view.result.num_committed > 0) & (view.num_computed_tokens + 6 <= limits)
        live = fits.nonzero().flatten().tolist()
        if not live:
            return
        base = {r: int(view.num_computed_tokens[r]) for r in live}
        root = {r: int(view.root_token_ids[r]) for r in live}
        first = {r: [Row(root[r], base[r], base[r])] for r in live}
        second, third, fourth = {}, {}, {}
        for r in live:
            top = base[r]
            children = [Row(3 + r, top + 1, top + 1, top), Row(9, top + 1, top + 2, top)]
            second[r] = [*children[: 1 + r % 2], Row(1, 0, -1, top), *children[1 + r % 2 :]][: 3 - (r == 2)]
            parent = top + 1 if r == 2 else top + 2
            third[r] = [Row(12, top + 2, top + 4, parent), Row(13, top + 2, top + 3, top + 1)][: 1 + r % 2]
            fourth[r] = [Row(14 + r, top + 3, top + 5, top + 4)]
        known: dict[tuple[int, int], Row] = {}
        for level in (first, second, third, fourth):
            for r in live:
                known |= {(r, row.slot): row for row in level[r] if row.slot >= 0}
            before = [tensor.clone() for pair in _draft_caches(self.llm) for tensor in pair]
            outputs = drafter.forward([(int(view.req_idx[r]), level[r]) for r in live])
            self._check_level(drafter, view, live, level, known, outputs)
            self._check_writes(before, sum(row.slot >= 0 for rows in level.values() for row in rows))

    def _check_absorbed(self, drafter: AttentionDrafter, view: Any) -> None:
        """Every committed row saw the plain context before it."""
        for place, position in enumerate(view.positions.tolist()):
            if position >= 0:
                slot = int(view.row_req_idx[place])
                tokens = view.token_history[slot, : position + 1].tolist()
                for layer in LAYERS:
                    expected = drafter.modules[layer.name].dense(tokens, range(position + 1), layer.window)
                    close(drafter.absorbed[layer.name][place], expected)

    def _check_level(self, drafter, view, live, level, known, outputs) -> None:
        place = 0
        for r in live:
            context = context_of(view, r)
            base = len(context)
            for row in level[r]:
                if row.slot < 0:
                    self.padded += 1
                else:
                    branch = [row]
                    while branch[0].slot != base:
                        branch.insert(0, known[r, branch[0].parent])
                    tokens = [*context, *(each.token for each in branch)]
                    positions = [*range(base), *(each.position for each in branch)]
                    for layer in LAYERS:
                        expected = drafter.modules[layer.name].dense(tokens, positions, layer.window)
                        close(outputs[layer.name][place], expected)
                    self.rows += 1
                place += 1
        assert all(len(output) == place and output.shape[1] == HEADS for output in outputs.values())

    def _check_writes(self, before: list[torch.Tensor], count: int) -> None:
        """Keys and values of each layer changed in one slot per row at most, and padding rows wrote nothing."""
        after = [tensor for pair in _draft_caches(self.llm) for tensor in pair]
        for old, new in zip(before, after, strict=True):
            assert int((old != new).any(-1).any(-1).sum()) <= count
            assert not new[: self.llm.config.block_size].any(), "padding went to a live or null slot"


def _draft_caches(llm: LLM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return llm.engine.core.runner.cache.layers[-len(LAYERS) :]


@LATE
def test_attention_over_context_and_trees(late: bool, target: PlainReference) -> None:
    """Absorbed rows and tree rows of ragged requests attend like dense attention, with and without a window."""
    grower = TreeGrower()
    llm = build(target, draft=grower, async_scheduling=late, max_num_batched_tokens=8)
    grower.llm = llm
    generate(llm)
    assert grower.rows > 100
    assert grower.padded > 20
    assert max(len(ask.prompt) for ask in ASKS) > max(WINDOWS), "the window was meant to hide something"


def test_each_layer_runs_its_own_kernel(target: PlainReference) -> None:
    """Layers with a window run the sliding kernel with their own window, the others the full one without."""
    kernels = {"attention:full/verify": Counting(), "attention:sliding/verify": Counting()}
    llm = build(target, kernels=kernels)
    generate(llm)
    full, sliding = (kernel.windows for kernel in kernels.values())
    assert set(full) == {None}
    assert sliding == list(WINDOWS) * (len(sliding) // 2)
    assert 2 * len(full) == 3 * len(sliding) > 0, "two layers of the target and one of the drafter; two of the drafter"


def test_load_shares_the_targets_weights(target: PlainReference) -> None:
    """`load` gives exactly the weights asked for, equal to the checkpoint's, and the target's own memory."""
    names = (EMBEDDING, "lm_head.weight", "model.norm.weight")
    llm = build(target, names=names)
    loaded = llm.engine.core.runner.speculator.loaded
    assert tuple(loaded) == names
    stored = dict(target.module.named_parameters())
    shared = llm.engine.model.named_parameters()
    for name in names:
        assert torch.equal(loaded[name], stored[name])
        assert loaded[name].data_ptr() == shared[name].data_ptr()


def test_unknown_names_are_refused(target: PlainReference) -> None:
    """An unknown weight names close ones, an unknown draft layer the declared ones."""
    with pytest.raises(ConfigError, match=r"weight name='model.embed_token.weight'.*model\.embed_tokens\.weight"):
        build(target, names=("model.embed_token.weight",))
    host = build(target).engine.core.runner.speculator.host
    with pytest.raises(ConfigError, match=r"draft layer='far'.*full, near, nearest"):
        host.attend("far", *(torch.zeros(1, 2, 8),) * 3)


def test_sizes_of_the_host(target: PlainReference) -> None:
    """The host names the engine's slots, context and vocabulary."""
    host = build(target).engine.core.runner.speculator.host
    assert (host.max_num_seqs, host.max_model_len, host.vocab_size) == (3, 48, 24)
