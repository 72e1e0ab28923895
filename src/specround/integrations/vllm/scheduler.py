"""`RoundScheduler`: vLLM's scheduler, which asks the speculator's policies and says what finished requests kept."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from specround.contract import RoundStats, SpeculatorError, parse_speculative_config
from specround.integrations.vllm.limits import check_settings, check_wiring
from specround.integrations.vllm.policies import Policies, PoolState
from specround.integrations.vllm.settings import own_config
from specround.integrations.vllm.versions import check_version

KEPT = "specround_kept"
"""Attribute of vLLM's scheduler output: tokens kept by the requests that left, by id."""


class RoundScheduler(Scheduler):
    """Named by `--scheduler-cls`. It overrides small methods and leaves scheduling itself to vLLM."""

    _policies: Policies | None = None
    _configured_limit: int = 0
    _admit_limit: int | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        check_version()
        super().__init__(*arguments, **named)
        check_settings(self.vllm_config)
        self._speculation = parse_speculative_config(own_config(self.vllm_config.additional_config))
        check_wiring(self.vllm_config, self._speculation.num_speculative_tokens)
        declared = self._speculation.declare_resources()
        self.num_lookahead_tokens = declared.max_candidates - 1
        self._policies = Policies(self._speculation, declared.max_candidates, self.max_num_running_reqs)
        self._kept: dict[str, int] = {}
        self._chosen_logprobs: set[str] = set()
        self._last_result = time.perf_counter()

    @property
    def max_num_active_reqs(self) -> int:
        """Read for every waiting request; the speculator is asked once per scheduling pass."""
        if self._policies is None or not self._policies.asks_admission:
            return self._configured_limit
        if self._admit_limit is None:
            self._admit_limit = self._policies.admit_limit(self._pool_state())
        return min(self._configured_limit, self._admit_limit)

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, value: int) -> None:
        self._configured_limit = value

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """One scheduling pass."""
        self._admit_limit = None
        for request in self.running:
            if (
                self._chosen_logprobs or request.resumable
            ):  # a session that waits for more input keeps its last token unverified
                request.spec_token_ids = []
        return super().schedule(*arguments, **named)

    def add_request(self, request: Any, *arguments: Any, **named: Any) -> Any:
        """Add a request; vLLM has log-probabilities of tokens that it names in steps without drafts only."""
        params = request.sampling_params
        if params is not None and params.logprob_token_ids is not None:
            self._chosen_logprobs.add(request.request_id)
        return super().add_request(request, *arguments, **named)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Choose the next round's budget and hand over what the requests that left have kept."""
        assert self._policies is not None
        if scheduler_output.num_scheduled_tokens:
            budget = self._policies.candidate_budget(self._pool_state())
            scheduler_output.num_spec_tokens_to_schedule = min(budget - 1, scheduler_output.num_spec_tokens_to_schedule)
            self._policies.step += 1
        setattr(scheduler_output, KEPT, self._kept)
        self._kept = {}
        super()._update_after_schedule(scheduler_output)

    def _preempt_request(self, request: Any, *arguments: Any, **named: Any) -> Any:
        """Preempt a request, and remember how many tokens it has."""
        self._kept[request.request_id] = request.num_tokens
        return super()._preempt_request(request, *arguments, **named)

    def _free_request(self, request: Any, *arguments: Any, **named: Any) -> Any:
        """Free a finished request, and remember how many tokens it kept."""
        self._kept[request.request_id] = request.num_tokens
        self._chosen_logprobs.discard(request.request_id)
        return super()._free_request(request, *arguments, **named)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's results; the speculator learns how many candidates were verified and committed."""
        updates = super().update_from_output(scheduler_output, model_runner_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        committed = model_runner_output.sampled_token_ids or []
        now = time.perf_counter()
        if committed:
            counts = [len(tokens) for tokens in committed]
            stats = RoundStats(
                step=self._policies.step - 1 if self._policies is not None else 0,
                seconds=now - self._last_result,
                num_candidates=tuple(
                    (1 + len(drafts.get(name, ()))) if count else 0
                    for name, count in zip(model_runner_output.req_ids, counts, strict=True)
                ),
                num_committed=tuple(counts),
            )
            try:
                self._speculation.round_finished(stats)
            except (Exception, SystemExit) as error:
                cause = f"{type(error).__name__}: {error}"
                raise SpeculatorError(type(self._speculation).__name__, "round_finished", (), cause) from error
        self._last_result = now
        return updates

    def _pool_state(self) -> PoolState:
        pool = self.kv_cache_manager.block_pool
        num_running, num_waiting = self.get_request_counts()
        return PoolState(
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=pool.get_num_free_blocks(),
            num_total_blocks=pool.num_gpu_blocks - 1,
            block_size=self.block_size,
        )
