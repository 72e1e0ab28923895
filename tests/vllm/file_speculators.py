"""Speculators for the vLLM tests: their settings are JSON values, as vLLM's configuration wants them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from adversarial import AdversarialConfig

from specround import register_speculator
from specround.speculators.suffix_tree import SuffixTreeConfig


@register_speculator("adversarial_from_file")
@dataclass(frozen=True, kw_only=True)
class AdversarialFromFile(AdversarialConfig):
    """The adversarial speculator, which is told the plain answers in a file of [prompt, answer] pairs."""

    answers_file: str

    def __post_init__(self):
        super().__post_init__()
        pairs = json.loads(Path(self.answers_file).read_text())
        object.__setattr__(self, "answers", {tuple(prompt): answer for prompt, answer in pairs})


def triton_kernels():
    """The Triton kernels; imported late, as only vLLM's process asks for the interpreter before Triton is imported."""
    from specround.kernels.gpu import triton_kernels

    return triton_kernels()


@register_speculator("adversarial_on_triton")
@dataclass(frozen=True, kw_only=True)
class AdversarialOnTriton(AdversarialFromFile):
    """The adversarial speculator on the Triton kernels."""

    spec_kernel_providers = (triton_kernels,)


@register_speculator("suffix_with_policies")
@dataclass(frozen=True, kw_only=True)
class SuffixWithPolicies(SuffixTreeConfig):
    """`suffix_tree` with policies that are easy to see: at most `most_running` requests, budgets in turn."""

    most_running: int = 2
    budgets: tuple[int, ...] = (1, 3, 5)

    def admit_limit(self, view):
        assert view.num_waiting >= 1
        assert view.num_running <= self.most_running
        return self.most_running

    def candidate_budget(self, view):
        assert 1 <= view.num_running <= self.most_running
        assert 0 <= view.num_free_blocks <= view.num_total_blocks
        return self.budgets[view.step % len(self.budgets)]


@register_speculator("failing")
@dataclass(frozen=True, kw_only=True)
class FailingConfig(SuffixTreeConfig):
    """`suffix_tree` whose plan fails in the third round."""

    def create(self, resources, host, device):
        speculator = super().create(resources, host, device)
        plan, calls = speculator.plan, []

        def failing_plan(view):
            calls.append(view)
            if len(calls) == 3:
                raise ZeroDivisionError("the third round")
            return plan(view)

        speculator.plan = failing_plan
        return speculator
