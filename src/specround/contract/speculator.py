"""`SpeculatorConfig` and `BaseSpeculator`: the hooks a speculator may override, in call order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specround.contract.accept import AcceptResult
from specround.contract.budget import BudgetView
from specround.contract.capabilities import SpecCapabilities
from specround.contract.errors import CapabilityError, ConfigError
from specround.contract.kernel import KernelProvider
from specround.contract.observation import RoundStats, StepObservation
from specround.contract.plan import VerifyPlan
from specround.contract.resources import SpecResources
from specround.contract.views import PlanView, ProposeView, VerifyOutput

if TYPE_CHECKING:
    import torch

    from specround.contract.draft import DraftHost

BatchSizeSchedule = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class SpeculatorConfig:
    """Start-up choices of a speculator, and the policies that run in the scheduler on the host.

    Subclass it as a frozen keyword-only dataclass; its fields are the keys users may write in `speculative_config`
    beside `"method"`. Register it with `register_speculator`.

    Attributes:
        num_speculative_tokens: K, the most drafts a request verifies in one round, >= 1.
        num_speculative_tokens_per_batch_size: Optional schedule of `[first, last, K]` entries: with `first` to `last`
            requests running (inclusive) the budget is K drafts (0 allowed), and the configured K outside every entry.

    Raises:
        ConfigError: A field is out of range.

    Example::

        @register_speculator("mine")
        @dataclass(frozen=True, kw_only=True)
        class MyConfig(SpeculatorConfig):
            width: int = 2

            def declare_resources(self):
                return SpecResources(max_candidates=self.num_speculative_tokens + 1, max_branching=self.width)

            def create(self, resources, host, device):
                return MySpeculator(self, resources, host, device)
    """

    method: ClassVar[str] = ""
    spec_kernel_providers: ClassVar[tuple[KernelProvider, ...]] = ()
    """Kernel providers that overlay the built-in kernels, in order; a later one wins a key."""

    num_speculative_tokens: int
    num_speculative_tokens_per_batch_size: BatchSizeSchedule | None = None

    def __post_init__(self) -> None:
        tokens = self.num_speculative_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError("num_speculative_tokens", tokens, "an integer >= 1")
        if self.num_speculative_tokens_per_batch_size is not None:
            schedule = _check_schedule(self.num_speculative_tokens_per_batch_size, tokens)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", schedule)

    def declare_resources(self) -> SpecResources:
        """What rounds may hold; the default is a chain of K drafts."""
        return SpecResources(max_candidates=self.num_speculative_tokens + 1)

    def adapt_resources(self, resources: SpecResources, capabilities: SpecCapabilities) -> SpecResources:
        """Lower the declared resources to what the target verifies; called once, before graphs are captured.

        The default runs a mask as a tree and a tree as a chain of the same length.

        Raises:
            CapabilityError: The target verifies nothing (`capabilities.kind == "none"`).
        """
        if capabilities.kind == "none":
            why = "; ".join(capabilities.reasons)
            raise CapabilityError(f"speculative decoding is refused for this model: {why}")
        return resources.lowered(capabilities.kind)

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> BaseSpeculator:
        """Build the speculator. `resources` are the declared ones; `bind_resources` brings the effective ones."""
        raise NotImplementedError(f"{type(self).__name__}.create")

    def admit_limit(self, view: BudgetView) -> int | None:
        """The most requests that may run once waiting ones are admitted, >= 1; None = no limit.

        Asked once per scheduling pass that has waiting requests, after running ones are scheduled. Not called unless
        overridden. It never preempts.
        """
        return None

    def candidate_budget(self, view: BudgetView) -> int:
        """Candidates (drafts + 1) the next round may verify per request, >= 1; capped at `view.max_candidates`.

        The default is the batch-size schedule, else K + 1.
        """
        for first, last, tokens in self.num_speculative_tokens_per_batch_size or ():
            if first <= view.num_running <= last:
                return tokens + 1
        return self.num_speculative_tokens + 1

    def round_finished(self, stats: RoundStats) -> None:
        """Host hook after a round's counts reached the host; this is how a policy learns acceptance and step time."""


class BaseSpeculator:
    """A speculator's side of the round. Every hook has a default; one that is not overridden costs nothing.

    Device hooks (`plan`, `accept`, `observe_step`, `propose`, `absorb`) must not wait for the device. With
    `drafting="device"` they run while a graph is captured and are then replayed, unless `capturable` is False.

    Example:
        A speculator that drafts "repeat the last token" K times, as a chain, with one hook::

            class Repeat(BaseSpeculator):
                def propose(self, view):
                    drafts = view.root_token_ids[:, None].expand(-1, view.draft_token_ids.shape[1])
                    view.draft_token_ids.index_copy_(0, view.req_idx, drafts)
    """

    capturable: ClassVar[bool] = True

    def bind_resources(self, effective: SpecResources) -> None:
        """Called once with what is left after lowering; plans of a higher kind are refused afterwards."""

    def request_started(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Host hook: a request starts, or resumes after preemption.

        Args:
            request_id: The request.
            req_idx: Its persistent slot from now on.
            token_ids: Its prompt and, when it resumes, the tokens generated so far.
        """

    def request_finished(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Host hook: a request leaves its slot (finished, aborted or preempted).

        Args:
            request_id: The request.
            req_idx: The slot that is free again.
            token_ids: Its prompt and the tokens that were kept.
        """

    def plan(self, view: PlanView) -> VerifyPlan | None:
        """Choose the rows to verify; None = the chain of the engine's draft buffer."""
        return None

    def accept(self, plan: VerifyPlan, output: VerifyOutput) -> AcceptResult | None:
        """Choose the rows to keep; None = built-in acceptance. Exactness claims then no longer hold."""
        return None

    def observe_step(self, observation: StepObservation) -> None:
        """See what a sampled step did, after commit and before propose."""

    def propose(self, view: ProposeView) -> Sequence[int] | None:
        """Draft for the next round, into `view.draft_token_ids` or buffers of one's own, by `req_idx`.

        Returns:
            None; or, from a drafter that knows it on the host, the number of drafts of each request in batch order: the
            next round then has no rows for drafts that do not exist.
        """
        return None

    def absorb(self, view: ProposeView) -> None:
        """Called instead of `propose` when the next round verifies no drafts, so that draft caches follow."""


def overrides(instance: object, base: type, hook: str) -> bool:
    """Whether an object's class overrides a hook of `base`; asked once, at start-up.

    Example:
        >>> overrides(Repeat(), BaseSpeculator, "propose"), overrides(Repeat(), BaseSpeculator, "plan")
        (True, False)
    """
    return getattr(type(instance), hook) is not getattr(base, hook)


def _check_schedule(schedule: object, limit: int) -> BatchSizeSchedule:
    field = "num_speculative_tokens_per_batch_size"
    allowed = f"a list of [first, last, K] integers with 1 <= first <= last and 0 <= K <= {limit}"
    if not isinstance(schedule, (list, tuple)):
        raise ConfigError(field, schedule, allowed)
    for entry in schedule:
        whole = isinstance(entry, (list, tuple)) and len(entry) == 3 and all(type(part) is int for part in entry)
        if not whole or not (1 <= entry[0] <= entry[1] and 0 <= entry[2] <= limit):
            raise ConfigError(field, schedule, allowed)
    return tuple((entry[0], entry[1], entry[2]) for entry in schedule)
