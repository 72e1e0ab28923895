"""A speculator whose acceptance lies: it commits another token than the target chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specround.contract import AcceptResult, BaseSpeculator, SpeculatorConfig, VerifyOutput, VerifyPlan


@dataclass(frozen=True, kw_only=True)
class LyingConfig(SpeculatorConfig):
    """Commits the token of rank `rank`: 0 is honest, 1 is the runner-up."""

    rank: int = 1

    def create(self, resources, host, device):
        return Lying(self.rank)


class Lying(BaseSpeculator):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def accept(self, plan: VerifyPlan, output: VerifyOutput) -> AcceptResult:
        path = torch.full_like(plan.token_ids, -1, dtype=torch.int32)
        tokens = torch.full_like(plan.token_ids, -1)
        count = plan.num_candidates.clamp(max=1)
        for request in range(plan.num_requests):
            if count[request]:
                logits = output.logits[int(output.root_row[request])]
                path[request, 0], tokens[request, 0] = 0, logits.topk(self.rank + 1).indices[-1]
        return AcceptResult(path, count, tokens)
