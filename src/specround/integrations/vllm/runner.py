"""`RoundRunner`: vLLM's V2 runner with the round in it. It overrides small methods; the step itself stays vLLM's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from specround.contract import ConfigError, SpeculatorConfig, parse_speculative_config
from specround.integrations.vllm.attention import RoundAttention, slot_rows
from specround.integrations.vllm.batch import StepRequests
from specround.integrations.vllm.build import build_steps
from specround.integrations.vllm.limits import sampling_limit
from specround.integrations.vllm.proposer import RoundProposer
from specround.integrations.vllm.sampling import RoundRejectionSampler, RoundSampler
from specround.integrations.vllm.scheduler import KEPT
from specround.integrations.vllm.settings import own_config
from specround.integrations.vllm.step import RoundSteps

logger = logging.getLogger(__name__)


class RoundRunner(GPUModelRunner):
    """Plans before the forward, accepts in the sampler, commits after it. The V2 runner of every device is this one."""

    steps: RoundSteps
    sampler: Any

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._speculation: SpeculatorConfig = parse_speculative_config(own_config(vllm_config.additional_config))
        self.speculator: RoundProposer = RoundProposer(self.num_speculative_steps, device)
        self._kept: dict[str, int] = {}
        self._caches: list[Tensor] = []

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Load the target, then the speculator, which may load models of its own."""
        super().load_model(*arguments, **named)
        self.steps = build_steps(self._speculation, self)
        self.speculator.steps = self.steps
        self.sampler = RoundSampler.adopt(self.sampler, self.steps)
        self.rejection_sampler = RoundRejectionSampler(self.sampler, self.speculative_config, self.device)

    def initialize_kv_cache(self, *arguments: Any, **named: Any) -> None:
        """Allocate KV and remember it slot by slot, for commit.

        Raises:
            ConfigError: Layers have block tables of their own, or a cache cannot be seen slot by slot.
        """
        super().initialize_kv_cache(*arguments, **named)
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            allowed = "1: with disable_hybrid_kv_cache_manager=True windowed and full layers share one block table"
            raise ConfigError("kv_cache_groups", len(groups), allowed)
        for group in self.attn_groups[0]:
            if not issubclass(group.backend.get_impl_cls(), RoundAttention):
                raise ConfigError("attention backend", group.backend.get_name(), "ours, for every layer")
        self._caches = [slot_rows(cache)[None] for cache in self.kv_caches]

    def finish_requests(self, scheduler_output: Any) -> None:
        """Remove requests that ended or were preempted; the scheduler said what they kept."""
        self._kept = getattr(scheduler_output, KEPT, {})
        super().finish_requests(scheduler_output)
        self._kept = {}

    def _remove_request(self, req_id: str) -> Any:
        """Remove a request and tell the speculator."""
        removed = super()._remove_request(req_id)
        self.steps.forget(req_id, self._kept.get(req_id))
        return removed

    def add_requests(self, scheduler_output: Any) -> None:
        """Add requests and tell the speculator."""
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            req_idx = self.req_states.req_id_to_index[new.req_id]
            params, tokens = new.sampling_params, list(new.prefill_token_ids)
            states = self.sampler.sampling_states
            self.steps.start(new.req_id, req_idx, tokens, int(new.prompt_len) + (params.max_tokens or 1))
            self.steps.table.set_sampling(req_idx, float(params.temperature), int(states.seeds.np[req_idx]))
            limit = sampling_limit(params)
            if limit.kind == "none":
                logger.info("request %s verifies no drafts: %s", new.req_id, limit.reason)
                self.steps.table.plain.add(new.req_id)

    def prepare_attn(self, input_batch: Any) -> Any:
        """Plan the step: ids, positions and slots of its rows replace those of vLLM's chain."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        count, total = input_batch.num_reqs, input_batch.num_tokens
        step = self.steps.plan(self._requests(input_batch), block_tables[0][:count], int(self.kernel_block_sizes[0]))
        layout = step.layout
        input_batch.input_ids[:total].copy_(layout.input_ids)
        input_batch.positions[:total].copy_(layout.positions)
        slot_mappings[0, :total].copy_(torch.where(layout.slots > 0, layout.slots, -1))
        for group in self.attn_groups[0]:
            group.get_metadata_builder().rows = layout.rows
        return block_tables, slot_mappings

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Accept, then commit."""
        output = super().sample(hidden_states, input_batch, grammar_output)
        if self.steps.current is not None:
            self.steps.commit(self._caches, hidden_states)
        return output

    def postprocess_sampled(self, *arguments: Any, **named: Any) -> None:
        """Update vLLM's request state, then let the speculator observe."""
        super().postprocess_sampled(*arguments, **named)
        if self.steps.current is not None:
            self.steps.observe()

    def take_draft_token_ids(self) -> Any:
        """Placeholders of the drafts that stand ready, as many as there are for each request."""
        drafts = super().take_draft_token_ids()
        if drafts is not None:
            ready = self.steps.num_drafts
            per_request = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            drafts.draft_token_ids = [tokens[: ready.get(name, 0)] for name, tokens in per_request]
        return drafts

    def _requests(self, input_batch: Any) -> StepRequests:
        drafts = input_batch.num_draft_tokens_per_req
        count = input_batch.num_reqs
        return StepRequests(
            request_ids=tuple(input_batch.req_ids),
            req_idx=tuple(input_batch.idx_mapping_np[:count].tolist()),
            num_rows=tuple(input_batch.num_scheduled_tokens[:count].tolist()),
            num_drafts=(0,) * count if drafts is None else tuple(drafts[:count].tolist()),
            num_computed=tuple(input_batch.num_computed_tokens_np[:count].tolist()),
            prefill_len=tuple(input_batch.prefill_len_np[:count].tolist()),
        )
