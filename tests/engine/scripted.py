"""A speculator whose hooks are given from outside: tests log them, bend them, and make them fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specround import BaseSpeculator, BudgetView, SpecResources, SpeculatorConfig, register_speculator
from specround.contract import RoundStats

DEVICE_HOOKS = ("plan", "accept", "observe_step", "propose", "absorb", "request_started", "request_finished")
POLICIES = ("candidate_budget", "admit_limit", "round_finished")
START_UP_HOOKS = ("declare_resources", "adapt_resources", "create", "bind_resources")


@register_speculator("scripted")
@dataclass(frozen=True, kw_only=True)
class ScriptedConfig(SpeculatorConfig):
    """Settings.

    Attributes:
        hooks: Replacements by hook name; they get the speculator or config, then the hook's arguments.
        log: Receives (hook, arguments) of every call.
        resources: Declared resources, None = a chain.
    """

    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    log: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    resources: SpecResources | None = None

    def call(self, owner: object, hook: str, *args: Any) -> Any:
        self.log.append((hook, args))
        return self.hooks[hook](owner, *args) if hook in self.hooks else NotImplemented

    def declare_resources(self) -> SpecResources:
        answer = self.call(self, "declare_resources")
        return (self.resources or super().declare_resources()) if answer is NotImplemented else answer

    def adapt_resources(self, resources, capabilities):
        answer = self.call(self, "adapt_resources", resources, capabilities)
        return super().adapt_resources(resources, capabilities) if answer is NotImplemented else answer

    def create(self, resources, host, device):
        answer = self.call(self, "create", resources, host, device)
        return ScriptedSpeculator(self) if answer is NotImplemented else answer

    def candidate_budget(self, view: BudgetView) -> int:
        answer = self.call(self, "candidate_budget", view)
        return super().candidate_budget(view) if answer is NotImplemented else answer

    def admit_limit(self, view: BudgetView) -> int | None:
        answer = self.call(self, "admit_limit", view)
        return None if answer is NotImplemented else answer

    def round_finished(self, stats: RoundStats) -> None:
        self.call(self, "round_finished", stats)


class ScriptedSpeculator(BaseSpeculator):
    """Without replacements: drafts "the last token once more" as a chain, and leaves the rest to the engine."""

    def __init__(self, config: ScriptedConfig) -> None:
        self.config = config

    def bind_resources(self, effective):
        self.config.call(self, "bind_resources", effective)

    def request_started(self, request_id, req_idx, token_ids):
        self.config.call(self, "request_started", request_id, req_idx, token_ids)

    def request_finished(self, request_id, req_idx, token_ids):
        self.config.call(self, "request_finished", request_id, req_idx, token_ids)

    def plan(self, view):
        answer = self.config.call(self, "plan", view)
        return None if answer is NotImplemented else answer

    def accept(self, plan, output):
        answer = self.config.call(self, "accept", plan, output)
        return None if answer is NotImplemented else answer

    def observe_step(self, observation):
        self.config.call(self, "observe_step", observation)

    def propose(self, view):
        if self.config.call(self, "propose", view) is NotImplemented:
            drafts = view.root_token_ids[:, None].expand(-1, view.draft_token_ids.shape[1])
            view.draft_token_ids.index_copy_(0, view.req_idx, drafts)

    def absorb(self, view):
        self.config.call(self, "absorb", view)


def scripted(drafts: int = 3, **values: Any) -> dict[str, Any]:
    """`speculative_config` of a scripted speculator; keywords that name hooks replace them."""
    known = {*DEVICE_HOOKS, *POLICIES, *START_UP_HOOKS}
    hooks = {name: value for name, value in values.items() if name in known}
    rest = {name: value for name, value in values.items() if name not in known}
    return {"method": "scripted", "num_speculative_tokens": drafts, "hooks": hooks, **rest}


def tree(token_ids: list[list[int]], parents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, counts and parents of a tree plan as tensors."""
    used = [sum(token != -1 for token in row) for row in token_ids]
    return torch.tensor(token_ids), torch.tensor(used, dtype=torch.int32), torch.tensor(parents, dtype=torch.int32)
