"""Asking a speculator's scheduling policies and checking their answers, whatever scheduler asks. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from specround.contract import BudgetView, SpeculatorConfig, SpeculatorError, overrides


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """What a scheduler knows when it asks.

    Attributes:
        num_running: Requests running in this step.
        num_waiting: Requests waiting, preempted ones included.
        num_free_blocks: Free blocks.
        num_total_blocks: Usable blocks.
        block_size: Tokens per block.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    block_size: int


class Policies:
    """A speculator's `admit_limit` and `candidate_budget`.

    Args:
        config: The speculator.
        max_candidates: The cap on candidates.
        max_num_seqs: The host's own limit of running requests.
    """

    def __init__(self, config: SpeculatorConfig, max_candidates: int, max_num_seqs: int) -> None:
        self._config, self._max_candidates, self._max_num_seqs = config, max_candidates, max_num_seqs
        self.asks_admission = overrides(config, SpeculatorConfig, "admit_limit")
        self.step = 0

    def admit_limit(self, state: PoolState) -> int:
        """The most requests that may run.

        Raises:
            SpeculatorError: The policy failed or answered something else than None or an integer >= 1.
        """
        answer = self._ask("admit_limit", state)
        return self._max_num_seqs if answer is None else min(answer, self._max_num_seqs)

    def candidate_budget(self, state: PoolState) -> int:
        """Candidates (drafts + 1) the next round may verify.

        Raises:
            SpeculatorError: The policy failed or answered something else than an integer >= 1.
        """
        answer = self._ask("candidate_budget", state)
        assert answer is not None
        return min(answer, self._max_candidates)

    def _ask(self, policy: str, state: PoolState) -> int | None:
        name = type(self._config).__name__
        view = BudgetView(
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_free_blocks=state.num_free_blocks,
            num_total_blocks=state.num_total_blocks,
            block_size=state.block_size,
            num_spec_blocks_held=0,
            num_speculative_tokens=self._config.num_speculative_tokens,
            max_candidates=self._max_candidates,
            step=self.step,
        )
        try:
            answer = getattr(self._config, policy)(view)
        except (Exception, SystemExit) as error:
            raise SpeculatorError(name, policy, (), f"{type(error).__name__}: {error}") from error
        if answer is None and policy == "admit_limit":
            return None
        if not isinstance(answer, int) or isinstance(answer, bool) or answer < 1:
            raise SpeculatorError(name, policy, (), f"it returned {answer!r}: must be an integer >= 1")
        return answer
