"""Lookahead decoding: the target itself guesses n-grams in rows of a mask that are never accepted.

Run it from this directory: specround generate --model smollm2 --prompt "1 2 3 1 2 3 1 2" --show-rounds \
    --speculative-config '{"method": "lookahead:LookaheadConfig", "num_speculative_tokens": 23}'
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specround import AcceptResult, BaseSpeculator, SpecResources, SpeculatorConfig, VerifyPlan, register_speculator
from specround.contract import (
    MAX_TREE_COLUMNS,
    CapabilityError,
    ConfigError,
    DraftHost,
    PlanKind,
    PlanView,
    ProposeView,
    SpecCapabilities,
    VerifyOutput,
)


@register_speculator("lookahead")
@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(SpeculatorConfig):
    """Lookahead decoding: no draft model and no training; n-grams come from Jacobi iterations of the target itself.

    Every round verifies `guess_set_size` n-grams that start with the root, and beside them runs one Jacobi iteration
    over a window of `window_size` columns and `ngram_size - 1` levels, (W + G)(N - 1) rows with the root. Each column
    then holds a new n-gram, which joins the request's pool.

    Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv 2402.02057.

    Attributes:
        window_size: W, columns of the window, >= 1.
        ngram_size: N, tokens of an n-gram, >= 2; at most N - 1 drafts of a round are accepted.
        guess_set_size: G, n-grams verified at once, >= 1.
        pool_size: N-grams kept per request, at least 2W + N; the oldest one makes room.
        pool_from_text: N-grams of the prompt and of the committed tokens join the pool too.

    Raises:
        ConfigError: A field is out of range, the rows do not fit into `num_speculative_tokens`, or a plan would have
            more than 64 columns.

    Example:
        >>> LookaheadConfig(num_speculative_tokens=23).declare_resources().max_candidates
        24
    """

    window_size: int = 5
    ngram_size: int = 4
    guess_set_size: int = 3
    pool_size: int = 256
    pool_from_text: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in {"window_size": 1, "ngram_size": 2, "guess_set_size": 1}.items():
            if type(getattr(self, field)) is not int or getattr(self, field) < least:
                raise ConfigError(field, getattr(self, field), f"an integer >= {least}")
        if self.num_columns > MAX_TREE_COLUMNS:
            allowed = f"small enough for (window_size + guess_set_size) * (ngram_size - 1) <= {MAX_TREE_COLUMNS} rows"
            raise ConfigError("window_size", self.window_size, allowed)
        if self.num_speculative_tokens < self.num_columns - 1:
            allowed = f"at least (window_size + guess_set_size) * (ngram_size - 1) - 1 = {self.num_columns - 1}"
            raise ConfigError("num_speculative_tokens", self.num_speculative_tokens, allowed)
        least = 2 * self.window_size + self.ngram_size
        if type(self.pool_size) is not int or self.pool_size < least:
            raise ConfigError("pool_size", self.pool_size, f"an integer >= 2 * window_size + ngram_size = {least}")
        if type(self.pool_from_text) is not bool:
            raise ConfigError("pool_from_text", self.pool_from_text, "True or False")

    @property
    def num_columns(self) -> int:
        """C: the root, the guesses, and the window without its first place, which is the root."""
        return (self.window_size + self.guess_set_size) * (self.ngram_size - 1)

    def declare_resources(self) -> SpecResources:
        """A mask of all rows, drafted on the device. Probes count as children of one row."""
        return SpecResources(
            max_candidates=self.num_columns, max_branching=max(2, self.num_columns - 1), custom_mask=True
        )

    def adapt_resources(self, resources: SpecResources, capabilities: SpecCapabilities) -> SpecResources:
        """Without masks the window is verified as a tree; without trees it is left out, and one guess is a chain.

        Raises:
            CapabilityError: The target only chains, and without a window nothing would fill the pool.
        """
        lowered = super().adapt_resources(resources, capabilities)
        if lowered.kind != "chain":
            return lowered
        if not self.pool_from_text:
            why = "; ".join(capabilities.reasons)
            raise CapabilityError(f"lookahead without pool_from_text needs a target that verifies trees: {why}")
        return replace(lowered, max_candidates=self.ngram_size)

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> LookaheadSpeculator:
        """Build the speculator with buffers for every request slot of the host."""
        return LookaheadSpeculator(self, host.max_num_seqs + 1, device)


class WindowShape:
    """Where guesses and window stand in a plan: the root, guess after guess, then the window level by level.

    The window's place (l, i), level l and column i, stands i + l tokens after the root; (0, 0) is the root. It sees
    level 0 up to column i and then its own column's levels below l: what preceded it in its trajectory. That is a path
    from the root, so the window is also a tree, a comb. A plan with a mask hangs its rows below the first guess
    instead, which they do not see: thus they are probes and, as in the paper, only guesses can be accepted.

    Args:
        config: W, N and G.
    """

    def __init__(self, config: LookaheadConfig) -> None:
        self.width, self.levels, self.columns = config.window_size, config.ngram_size - 1, config.num_columns
        self.first = 1 + config.guess_set_size * self.levels
        """The window's first column, that of its second place."""
        guesses = [column - 1 if (column - 1) % self.levels else 0 for column in range(1, self.first)]
        window = [self._comb_parent(*divmod(place, self.width)) for place in range(1, self.width * self.levels)]
        self.comb = [-1, *guesses, *window]
        """Parent column of each column in the tree."""
        self.parents = [-1, *guesses, *[1] * len(window)]
        """Parent column of each column in the mask."""
        self.positions, self.sees = [0], [{0}]
        for column, parent in enumerate(self.comb[1:], 1):
            self.positions.append(self.positions[parent] + 1)
            self.sees.append(self.sees[parent] | {column})

    def column(self, level: int, place: int) -> int:
        """Column of a place of the window."""
        index = level * self.width + place
        return self.first + index - 1 if index else 0

    def _comb_parent(self, level: int, place: int) -> int:
        return self.column(level - 1, place) if level else self.column(0, place - 1)


class LookaheadSpeculator(BaseSpeculator):
    """Window and pool of every request slot on the device; nothing waits for the device.

    The tokens that the newest level predicts are read in `accept`, the hook that sees logits of all rows, probes too.

    Args:
        config: Sizes.
        num_slots: Request slots, the padding slot included.
        device: Where the buffers live.
    """

    def __init__(self, config: LookaheadConfig, num_slots: int, device: torch.device) -> None:
        self.config, self.shape = config, WindowShape(config)
        self.kind: PlanKind = "mask"
        shape, size = self.shape, config.ngram_size

        def constant(values: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(num_slots, *sizes, dtype=torch.int64, device=device)

        self._comb, self._parents = constant(shape.comb, torch.int32), constant(shape.parents, torch.int32)
        self._positions = constant(shape.positions, torch.int32)
        self._mask = torch.zeros(shape.columns, shape.columns, dtype=torch.bool, device=device)
        for column, seen in enumerate(shape.sees):
            self._mask[column, sorted(seen)] = True
        newest = [shape.column(shape.levels - 1, place) for place in range(shape.width)]
        self._newest_columns = constant(newest, torch.int64)
        self.window = zeros(shape.levels, shape.width)
        """`[slots, N - 1, W]`, the oldest level first; place (0, 0) is the root of the plan, whatever stands here."""
        self.predicted = zeros(shape.width)
        """`[slots, W]`, what the newest level predicts."""
        self.complete = torch.zeros(num_slots, dtype=torch.bool, device=device)
        """`[slots]`, whether the last plan held the whole window."""
        self.pool, self.age = zeros(config.pool_size, size), zeros(config.pool_size) - 1
        """`[slots, P, N]` n-grams, and `[slots, P]`: the higher the newer, -1 = no n-gram."""

    def bind_resources(self, effective: SpecResources) -> None:
        """Plan what is left after lowering."""
        self.kind = effective.kind

    def request_started(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """The window starts with tokens of the prompt, the pool with its n-grams, each once, the latest last."""
        size, limit = self.config.ngram_size, self.config.pool_size
        start = random.Random(0).choices(token_ids, k=self.shape.levels * self.shape.width)
        self.window[req_idx].copy_(torch.tensor(start).view(self.shape.levels, -1), non_blocking=True)
        self.age[req_idx], self.complete[req_idx] = -1, False
        ends = range(len(token_ids), size - 1, -1) if self.config.pool_from_text else ()
        ngrams = list(dict.fromkeys(tuple(token_ids[end - size : end]) for end in ends))[limit - 1 :: -1]
        if ngrams:
            self.pool[req_idx, : len(ngrams)].copy_(torch.tensor(ngrams), non_blocking=True)
            self.age[req_idx, : len(ngrams)] = torch.arange(len(ngrams), device=self.age.device)

    def plan(self, view: PlanView) -> VerifyPlan:
        """The newest n-grams of the pool that start with the root, then the window."""
        ngrams, found = self._guesses(view)
        root, shape = view.root_token_ids[:, None], self.shape
        if self.kind == "chain":
            token_ids = torch.cat([root, ngrams[:, 0]], 1)[:, : view.num_columns]
            num_candidates = torch.where(found[:, 0], view.max_rows, view.max_rows.clamp(max=1))
            return VerifyPlan(token_ids, num_candidates.clamp(max=token_ids.shape[1]))
        window = self.window[view.req_idx].flatten(1)[:, 1:]
        columns = min(view.num_columns, shape.columns)
        token_ids = torch.cat([root, ngrams.flatten(1), window], 1)[:, :columns]
        count, num_candidates = len(token_ids), view.max_rows.clamp(max=columns)
        if self.kind == "tree":
            return VerifyPlan(token_ids, num_candidates, self._comb[:columns].repeat(count, 1))
        return VerifyPlan(
            token_ids=token_ids,
            num_candidates=num_candidates,
            parents=self._parents[:columns].repeat(count, 1),
            positions=self._positions[:columns].repeat(count, 1),
            mask=self._mask[:columns, :columns].expand(count, -1, -1),
        )

    def accept(self, plan: VerifyPlan, output: VerifyOutput) -> AcceptResult | None:
        """Remember what the window's newest level predicts, and leave acceptance to the engine."""
        if self.kind != "chain" and output.logits.shape[0] > 0:
            rows = output.root_row[:, None] + self._newest_columns
            tokens = output.logits.argmax(-1)[rows.clamp(max=output.logits.shape[0] - 1)]  # [R, W]
            self.predicted.index_copy_(0, output.req_idx, tokens)
            self.complete.index_copy_(0, output.req_idx, plan.num_candidates >= self.shape.columns)
        return None

    def propose(self, view: ProposeView) -> None:
        """Collect n-grams and move the window on; the next plan is made of them."""
        self._follow(view)

    def absorb(self, view: ProposeView) -> None:
        """The same: the window of a plan may have been verified although the next one has no drafts."""
        self._follow(view)

    def _guesses(self, view: PlanView) -> tuple[Tensor, Tensor]:
        """`[R, G, N - 1]` continuations of the root, token 0 where there are too few; and `[R, G]`, whether found."""
        pool, age = self.pool[view.req_idx], self.age[view.req_idx]
        age = torch.where(pool[:, :, 0] == view.root_token_ids[:, None], age, -1)
        newest, place = age.topk(self.config.guess_set_size, dim=1)
        found = newest >= 0
        ngrams = pool.gather(1, place[:, :, None].expand(-1, -1, pool.shape[2]))[:, :, 1:]
        return torch.where(found[:, :, None], ngrams, 0), found

    def _follow(self, view: ProposeView) -> None:
        """After a round: every column of a complete window is an n-gram; then the oldest level leaves."""
        count = view.result.num_committed.to(torch.int64)[:, None]  # [R, 1]
        computed = view.num_computed_tokens.to(torch.int64)[:, None]
        complete = self.complete[view.req_idx][:, None]
        window, predicted = self.window[view.req_idx], self.predicted[view.req_idx]
        history = view.token_history[view.req_idx]
        window[:, 0, :1] = history.gather(1, (computed - count).clamp(min=0))  # the root that was verified
        levels = torch.cat([window, predicted[:, None]], 1)  # [R, N, W]
        ngrams, valid = levels.transpose(1, 2), complete.expand(-1, self.shape.width)
        if self.config.pool_from_text:
            text, fresh = self._ngrams_of_text(history, computed, count)
            ngrams, valid = torch.cat([ngrams, text], 1), torch.cat([valid, fresh], 1)
        self._remember(view.req_idx, ngrams, valid, computed)
        # A column stands for one token of the text: the accepted ones leave on the left and start again on the right.
        column = (torch.arange(self.shape.width, device=count.device) + count - 1) % self.shape.width
        moved = levels[:, 1:].gather(2, column[:, None].expand(-1, self.shape.levels, -1))
        self.window.index_copy_(0, view.req_idx, torch.where(complete[:, :, None], moved, window))

    def _ngrams_of_text(self, history: Tensor, computed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """`[R, W + N, N]` n-grams that end with this step's tokens, oldest first; and which of them exist."""
        size = self.config.ngram_size
        back = torch.arange(self.shape.width + size - 1, -1, -1, device=history.device)
        start = computed - back - (size - 1)  # [R, W + N]
        place = (start[:, :, None] + torch.arange(size, device=history.device)).clamp(min=0)
        ngrams = history.gather(1, place.flatten(1)).view_as(place)
        return ngrams, (back < count) & (start >= 0)

    def _remember(self, req_idx: Tensor, ngrams: Tensor, valid: Tensor, computed: Tensor) -> None:
        """Write n-grams over the oldest of the pool; one that comes again becomes the newest.

        Args:
            req_idx: `[R]` int64.
            ngrams: `[R, M, N]` int64, oldest first.
            valid: `[R, M]` bool, the ones to write.
            computed: `[R, 1]` int64, which grows from step to step.
        """
        pool, age = self.pool[req_idx], self.age[req_idx]
        again = (ngrams[:, :, None] == ngrams[:, None]).all(-1) & valid[:, None]  # [R, M, M]
        valid = valid & ~again.triu(1).any(2)
        order = (~valid).to(torch.int8).argsort(dim=1, stable=True)  # the ones to write first
        ngrams, valid = ngrams.gather(1, order[:, :, None].expand_as(ngrams)), valid.gather(1, order)
        known = (pool[:, None] == ngrams[:, :, None]).all(-1) & valid[:, :, None]  # [R, M, P]
        age = torch.where(known.any(1), -1, age)
        number = ngrams.shape[1]
        oldest, place = age.topk(number, dim=1, largest=False)
        newer = computed * number + torch.arange(number, device=age.device)
        age.scatter_(1, place, torch.where(valid, newer, oldest))
        wide = place[:, :, None].expand_as(ngrams)
        pool.scatter_(1, wide, torch.where(valid[:, :, None], ngrams, pool.gather(1, wide)))
        self.pool.index_copy_(0, req_idx, pool)
        self.age.index_copy_(0, req_idx, age)
