"""The speculator as vLLM sees it: something that is asked for drafts after each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from specround.integrations.vllm.step import RoundSteps


class RoundProposer(BaseSpeculator):
    """Takes the place of the drafter that vLLM made for its own speculative config.

    Args:
        num_drafts: K.
        device: Where drafts are.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self._num_drafts, self._device = num_drafts, device
        self.steps: RoundSteps | None = None
        """Set once the target is loaded."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    def propose(self, input_batch: Any, *arguments: Any, **named: Any) -> Tensor:
        """Drafts `[R, K]`, -1 = none; rows that the speculator plans itself stay at -1."""
        if self.steps is None or self.steps.current is None or named.get("dummy_run"):
            return torch.full((input_batch.num_reqs, self._num_drafts), -1, dtype=torch.int64, device=self._device)
        num_drafts = named.get("num_speculative_tokens")
        return self.steps.propose(self._num_drafts if num_drafts is None else int(num_drafts))
