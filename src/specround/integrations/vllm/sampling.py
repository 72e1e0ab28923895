"""vLLM's two samplers, whose draws are replaced by the round's acceptance."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from specround.contract import ConfigError
from specround.integrations.vllm.step import RoundSteps

_PARAMETERS = 8
"""Leading arguments of `Sampler.sample` that `Sampler.apply_sampling_params` takes too."""

_CHUNK_ROWS = 4
"""Place of `max_chunk_logits` among the arguments of `_verify_in_chunks` after the logits."""


class RoundSampler(Sampler):
    """Samples steps in which no request has drafts."""

    steps: RoundSteps

    @classmethod
    def adopt(cls, sampler: Sampler, steps: RoundSteps) -> RoundSampler:
        """A sampler that shares the state of vLLM's own.

        Args:
            sampler: vLLM's.
            steps: The rounds.

        Raises:
            ConfigError: The model brings a sampler of its own, whose draws would be lost.
        """
        if type(sampler) is not Sampler:
            raise ConfigError("sampler", type(sampler).__name__, "vLLM's Sampler: this model brings one of its own")
        adopted = cls.__new__(cls)
        adopted.__dict__ = sampler.__dict__ | {"steps": steps}
        return adopted

    def apply_sampling_params(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        *others: Any,
        skip_top_k_top_p: bool = False,
    ) -> Tensor:
        """Processed logits. On a CPU top-k and top-p are torch's: vLLM's kernel of them is not for the interpreter."""
        own = logits.device.type == "cpu" and not skip_top_k_top_p
        rows = (expanded_idx_mapping, idx_mapping, idx_mapping_np)
        processed: Tensor = super().apply_sampling_params(
            logits, *rows, *others, skip_top_k_top_p=own or skip_top_k_top_p
        )
        top_k, top_p = self.sampling_states.top_k, self.sampling_states.top_p
        are_cut = (top_k.np[idx_mapping_np] < logits.shape[1]).any() or (top_p.np[idx_mapping_np] < 1).any()
        if not own or not are_cut or processed is logits:  # itself: no request has parameters
            return processed
        cut: Tensor = apply_top_k_top_p_pytorch(
            processed, top_k.gpu[expanded_idx_mapping], top_p.gpu[expanded_idx_mapping]
        )
        return cut

    def sample(self, logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Tokens `[R]` and processed logits; a dummy run, which has no plan, is vLLM's own."""
        if self.steps.current is None:
            return super().sample(logits, *arguments, **named)  # type: ignore[no-any-return]
        processed = self.apply_sampling_params(logits, *arguments[: _PARAMETERS - 1])
        tokens, _ = self.steps.accept(logits, processed)
        return tokens[:, 0], processed


class RoundRejectionSampler(RejectionSampler):
    """Samples steps in which some request has drafts."""

    def _verify_in_chunks(self, logits: Tensor, *arguments: Any, **named: Any) -> Any:
        """A step at once, however many logits it has: a round accepts all its requests together."""
        given = [*arguments]
        given[_CHUNK_ROWS] = logits.shape[0]
        return super()._verify_in_chunks(logits, *given, **named)

    def _verify(
        self, logits: Tensor, draft_logits: Any, draft_sampled: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Processed logits, tokens `[R, K + 1]` and their number `[R]`."""
        steps: RoundSteps = self.sampler.steps
        step = steps.current
        expected = 0 if step is None else sum(step.requests.num_drafts) + len(step.requests.num_drafts)
        if logits.shape[0] != expected:
            raise RuntimeError(f"vLLM verifies {logits.shape[0]} rows of logits: must be the {expected} of its step")
        pos, _, idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens = arguments[:7]
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens,
        )
        tokens, num_committed = steps.accept(logits, processed)
        sampled = tokens.new_zeros(tokens.shape[0], self.num_speculative_steps + 1)
        sampled[:, : tokens.shape[1]] = tokens
        return processed, sampled, num_committed
