"""Lowering: once, at start-up, declared resources become effective ones."""

from __future__ import annotations

import logging

from specround.contract import PLAN_KINDS, ConfigError, SpecCapabilities, SpecResources, SpeculatorConfig

logger = logging.getLogger(__name__)


def lower_resources(config: SpeculatorConfig, declared: SpecResources, capabilities: SpecCapabilities) -> SpecResources:
    """Let the speculator adapt its declared resources to what the target verifies; one log line per reason.

    Raises:
        CapabilityError: The target verifies nothing.
        ConfigError: The speculator's answer is still above what the target verifies, or above what it declared.
    """
    if PLAN_KINDS.index(capabilities.kind) < PLAN_KINDS.index(declared.kind):
        for reason in capabilities.reasons:
            logger.warning("the target verifies at most a %s, not a %s: %s", capabilities.kind, declared.kind, reason)
    effective = config.adapt_resources(declared, capabilities)
    if effective.lowered(capabilities.kind) != effective:
        raise ConfigError(
            f"{type(config).__name__}.adapt_resources", effective.kind, f"at most {capabilities.kind!r} for this target"
        )
    if effective.max_candidates > declared.max_candidates:
        allowed = f"max_candidates of at most the declared {declared.max_candidates}"
        raise ConfigError(f"{type(config).__name__}.adapt_resources", effective.max_candidates, allowed)
    return effective
