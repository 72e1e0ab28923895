"""`BudgetView`: what both scheduling policies see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BudgetView:
    """The scheduler's state as `candidate_budget` and `admit_limit` see it. No field has a default.

    Attributes:
        num_running: Requests running in this step.
        num_waiting: Requests waiting, preempted ones included.
        num_free_blocks: Free blocks in the pool.
        num_total_blocks: Usable blocks in the pool.
        block_size: Tokens per block.
        num_spec_blocks_held: Recurrent state blocks held for draft rows.
        num_speculative_tokens: K, the configured drafts per round.
        max_candidates: The effective cap on candidates (drafts + 1).
        step: Number of the step, from 0.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    block_size: int
    num_spec_blocks_held: int
    num_speculative_tokens: int
    max_candidates: int
    step: int
