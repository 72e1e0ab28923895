"""`SpecRound`: one round, step by step, in the contract's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from specround.contract import (
    AcceptResult,
    BaseSpeculator,
    PlanError,
    ProposeView,
    SpecResources,
    SpeculatorError,
    StepObservation,
    VerifyOutput,
    VerifyPlan,
    overrides,
)
from specround.kernels.reference import PagedCommitKernel
from specround.kernels.reference_states import StateCommitKernel
from specround.round.acceptance import accept_match
from specround.round.batch import RoundBatch
from specround.round.chain import chain_plan
from specround.round.commit import CommittedRows, commit_paths, commit_rows
from specround.round.layout import PlanLayout, lay_out
from specround.round.plan_check import (
    check_num_drafts,
    check_plan_shape,
    check_plan_values,
    check_result,
    check_result_shape,
)


class SpecRound:
    """The round a speculator owns; without one, plain decoding: a chain of the root alone.

    Args:
        speculator: The speculator, already bound, or None.
        resources: Effective resources.
        commit_kernel: Kernel of `layout:paged_token/commit`.
        state_commit: Kernel of `layout:mamba_state@*/commit`, None for a target without recurrent layers.
        vocab_size: Size of the target's vocabulary.
        check_values: Read plans and results back and check them by value.
    """

    def __init__(
        self,
        speculator: BaseSpeculator | None,
        resources: SpecResources,
        commit_kernel: PagedCommitKernel,
        vocab_size: int,
        *,
        check_values: bool,
        state_commit: StateCommitKernel | None = None,
    ) -> None:
        self.speculator, self.resources = speculator or BaseSpeculator(), resources
        self.check_values, self._vocab_size = check_values, vocab_size
        self._commit_kernel, self._state_commit = commit_kernel, state_commit
        hooks = ("plan", "accept", "observe_step", "propose", "absorb")
        self.hooks = frozenset(hook for hook in hooks if overrides(self.speculator, BaseSpeculator, hook))

    def plan(self, batch: RoundBatch) -> VerifyPlan:
        """The speculator's plan, or the chain of the engine's draft buffer."""
        view, plan = batch.plan_view(), None
        if "plan" in self.hooks:
            with self._hook("plan"):
                plan = self.speculator.plan(view)
                if plan is not None:
                    check_plan_shape(plan, batch, self.resources)
                    if self.check_values:
                        check_plan_values(plan, batch, self.resources, self._vocab_size)
        if plan is None:
            plan = chain_plan(view)
            if self.check_values and "propose" in self.hooks:
                with self._hook("propose"):
                    check_plan_values(plan, batch, self.resources, self._vocab_size)
        return plan

    def lay_out(self, plan: VerifyPlan, batch: RoundBatch) -> PlanLayout:
        """Ids, positions, slots and masks of every row; the host's forward verifies them."""
        return lay_out(plan, batch)

    def accept(self, layout: PlanLayout, output: VerifyOutput, batch: RoundBatch) -> AcceptResult:
        """The speculator's path, or the longest path that agrees with the target's own draws."""
        if "accept" in self.hooks:
            with self._hook("accept"):
                result = self.speculator.accept(layout.plan, output)
                if result is not None:
                    check_result_shape(result, layout.plan)
                    if self.check_values:
                        check_result(result, layout, self._vocab_size)
                    return result
        return accept_match(layout, output, batch)

    def commit(
        self,
        layout: PlanLayout,
        result: AcceptResult,
        batch: RoundBatch,
        caches: Sequence[Tensor],
        hidden_states: Tensor | None,
    ) -> CommittedRows:
        """Caches and row tensors as a chain would have left them."""
        if layout.plan.kind != "chain":
            commit_paths(self._commit_kernel, caches, result, batch)
        if batch.states is not None and self._state_commit is not None:
            self._state_commit(batch.states, batch.req_idx, result)
        return commit_rows(layout, result, batch, hidden_states)

    def observe(self, observation: StepObservation) -> None:
        """Tell the speculator, if it listens."""
        if "observe_step" in self.hooks:
            with self._hook("observe_step"):
                self.speculator.observe_step(observation)

    def propose(self, view: ProposeView) -> Sequence[int] | None:
        """Draft for the next round, or let draft caches follow; the number of drafts per request where it is known."""
        view.draft_token_ids.index_fill_(0, view.req_idx, -1)
        if view.budget > 1 and "propose" in self.hooks:
            with self._hook("propose"):
                requests = view.num_rows if view.host is None else view.host.request_ids  # without padding
                return check_num_drafts(self.speculator.propose(view), len(requests))
        if view.budget == 1 and "absorb" in self.hooks:
            with self._hook("absorb"):
                self.speculator.absorb(view)
        return None

    @contextmanager
    def _hook(self, hook: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            cause = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
            raise SpeculatorError(type(self.speculator).__name__, hook, (), cause) from error
