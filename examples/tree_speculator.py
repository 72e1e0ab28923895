"""A tree speculator to copy: verify what followed the last W times the current token occurred, W branches at once.

A branch without an occurrence is verified as token 0, so that every shape is known without looking at the device.
Run it from this directory: specround generate --model smollm2 --prompt "1 2 3 1 2 3 1 2" --show-rounds \
    --speculative-config '{"method": "tree_speculator:RecallConfig", "num_speculative_tokens": 12}'
"""

from dataclasses import dataclass

import torch

from specround import BaseSpeculator, SpecResources, SpeculatorConfig, VerifyPlan, register_speculator


@register_speculator("recall")
@dataclass(frozen=True, kw_only=True)
class RecallConfig(SpeculatorConfig):
    branches: int = 3  # at most; there are never more than drafts

    def declare_resources(self):
        branches = min(self.branches, self.num_speculative_tokens)  # resources refuse what is no integer >= 1
        return SpecResources(max_candidates=self.num_speculative_tokens + 1, max_branching=branches)

    def create(self, resources, host, device):
        return RecallSpeculator()


class RecallSpeculator(BaseSpeculator):
    def bind_resources(self, effective):  # one branch where the target verifies chains only
        self.branches, self.drafts = effective.max_branching, effective.max_candidates - 1

    def plan(self, view):
        history = view.token_history[view.req_idx]  # [R, L]
        place = torch.arange(history.shape[1], device=history.device)
        branches = min(self.branches, history.shape[1])
        root = view.num_computed_tokens[:, None]
        seen = (history == view.root_token_ids[:, None]) & (place < root)
        found, start = torch.where(seen, place, -1).topk(branches, dim=1)  # the most recent occurrences
        step = torch.arange(1, self.drafts // branches + 1, device=history.device)
        source = start[:, None] + step[:, None]  # [R, length, branches]: depth by depth, so a cut keeps whole levels
        tokens = history.gather(1, source.flatten(1).clamp(max=history.shape[1] - 1)).view_as(source)
        known = (found[:, None] >= 0) & (source <= root[:, None])
        drafts = torch.where(known, tokens, 0).flatten(1)[:, : view.num_columns - 1]
        token_ids = torch.cat([view.root_token_ids[:, None], drafts], 1)
        num_candidates = view.max_rows.clamp(max=token_ids.shape[1])
        if self.branches == 1:
            return VerifyPlan(token_ids=token_ids, num_candidates=num_candidates)
        parents = (torch.arange(token_ids.shape[1], device=history.device) - branches).clamp(min=0)
        parents = parents.to(torch.int32).repeat(token_ids.shape[0], 1)
        return VerifyPlan(token_ids=token_ids, num_candidates=num_candidates, parents=parents)
