"""Lowering: once, at start-up, declared resources become effective ones."""

from __future__ import annotations

import logging

from torch import distributed

from specround.contract import PLAN_KINDS, ConfigError, SpecCapabilities, SpecResources, SpeculatorConfig

logger = logging.getLogger(__name__)


def lower_resources(config: SpeculatorConfig, declared: SpecResources, capabilities: SpecCapabilities) -> SpecResources:
    """Let the speculator adapt its declared resources to what the target verifies; one log line per reason.

    Raises:
        CapabilityError: The target verifies nothing.
        ConfigError: The speculator's answer is still above what the target verifies, or above what it declared.
    """
    if capabilities.kind != "none" and PLAN_KINDS.index(capabilities.kind) < PLAN_KINDS.index(declared.kind):
        for reason in capabilities.reasons:
            logger.warning("the target verifies at most a %s, not a %s: %s", capabilities.kind, declared.kind, reason)
    effective = config.adapt_resources(declared, capabilities)
    if effective.lowered(capabilities.kind) != effective:
        raise ConfigError(
            f"{type(config).__name__}.adapt_resources", effective.kind, f"at most {capabilities.kind!r} for this target"
        )
    _check_declared_covers(f"{type(config).__name__}.adapt_resources", declared, effective)
    return effective


def _check_declared_covers(field: str, declared: SpecResources, effective: SpecResources) -> None:
    """Nothing that memory was not sized for, and nothing that decides how a host is built."""
    if PLAN_KINDS.index(effective.kind) > PLAN_KINDS.index(declared.kind):
        raise ConfigError(field, effective.kind, f"at most the declared {declared.kind!r}")
    for name in ("max_candidates", "max_branching"):
        found, most = getattr(effective, name), getattr(declared, name)
        if found > most:
            raise ConfigError(field, found, f"{name} of at most the declared {most}")
    for name in ("drafting", "hidden_states", "draft_layers"):
        found, wanted = getattr(effective, name), getattr(declared, name)
        if found != wanted:
            raise ConfigError(field, found, f"{name}={wanted!r}, as declared")


def gather_capabilities(report: SpecCapabilities, group: distributed.ProcessGroup | None = None) -> SpecCapabilities:
    """What the whole target verifies: the minimum of every rank's report, the same on every rank.

    A collective: every rank of the group calls it once, at start-up, before `lower_resources`. Reasons are merged in
    the order of the ranks, so that every rank also logs the same lines. Without `torch.distributed` there is one rank.

    Args:
        report: What this rank's layers verify.
        group: The ranks that share the target; None = all of them.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return SpecCapabilities.reduce([report])
    reports = [report] * distributed.get_world_size(group)
    distributed.all_gather_object(reports, report, group=group)
    return SpecCapabilities.reduce(reports)
