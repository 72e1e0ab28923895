"""A tree speculator to copy: verify what followed the last W times the current token occurred, W branches at once.

Run it with: specround generate --model smollm2 --prompt "1 2 3 1 2 3 1 2" --show-rounds \
    --speculative-config '{"method": "tree_speculator:RecallConfig", "num_speculative_tokens": 12}'
"""

from dataclasses import dataclass

import torch

from specround import BaseSpeculator, SpecResources, SpeculatorConfig, VerifyPlan, register_speculator


@register_speculator("recall")
@dataclass(frozen=True, kw_only=True)
class RecallConfig(SpeculatorConfig):
    branches: int = 3

    def declare_resources(self):
        return SpecResources(max_candidates=self.num_speculative_tokens + 1, max_branching=self.branches)

    def create(self, resources, host, device):
        return RecallSpeculator(self.branches, self.num_speculative_tokens // self.branches)


class RecallSpeculator(BaseSpeculator):
    def __init__(self, branches, length):
        self.branches, self.length = branches, length

    def bind_resources(self, effective):
        if effective.max_branching == 1:  # the target verifies chains only: one branch, all of the budget
            self.branches, self.length = 1, effective.max_candidates - 1

    def plan(self, view):
        history = view.token_history[view.req_idx]  # [R, L]
        place = torch.arange(history.shape[1], device=history.device)
        root = view.num_computed_tokens[:, None]
        seen = (history == view.root_token_ids[:, None]) & (place < root)
        found, start = torch.where(seen, place, -1).topk(self.branches, dim=1)  # the most recent occurrences
        step = torch.arange(1, self.length + 1, device=history.device)
        source = start[:, None] + step[:, None]  # [R, length, branches]: depth by depth, so a cut keeps whole levels
        tokens = history.gather(1, source.flatten(1).clamp(max=history.shape[1] - 1)).view_as(source)
        known = (found[:, None] >= 0) & (source <= root[:, None])
        drafts = torch.where(known, tokens, 0).flatten(1)[:, : view.num_columns - 1]
        columns = torch.arange(1, drafts.shape[1] + 1, device=history.device)
        parents = (columns - self.branches).clamp(min=0)
        token_ids = torch.cat([view.root_token_ids[:, None], drafts], 1)
        if self.branches == 1:
            return VerifyPlan(token_ids=token_ids, num_candidates=view.max_rows.clamp(max=token_ids.shape[1]))
        parents = torch.nn.functional.pad(parents, (1, 0), value=-1).to(torch.int32).repeat(token_ids.shape[0], 1)
        return VerifyPlan(
            token_ids=token_ids, num_candidates=view.max_rows.clamp(max=token_ids.shape[1]), parents=parents
        )
