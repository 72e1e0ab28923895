"""The speculator's hooks at start-up, called and checked the same way in every host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specround.contract import (
    BaseSpeculator,
    ConfigError,
    DraftHost,
    SpecCapabilities,
    SpecResources,
    SpecRoundError,
    SpeculatorConfig,
    SpeculatorError,
)
from specround.round.lowering import lower_resources


def declared_resources(speculation: SpeculatorConfig) -> SpecResources:
    """What the speculator declares.

    Raises:
        ConfigError: It reads hidden states of single layers, which no host offers yet.
        SpeculatorError: The hook failed, or answered something else.
    """
    with _start_up_hook(speculation, "declare_resources"):
        declared = speculation.declare_resources()
        _check_answer(speculation, "declare_resources", declared, SpecResources)
    if isinstance(declared.hidden_states, tuple):
        allowed = "'none' or 'last': layer outputs are not offered yet"
        raise ConfigError("hidden_states", declared.hidden_states, allowed)
    return declared


def effective_resources(
    speculation: SpeculatorConfig, declared: SpecResources, capabilities: SpecCapabilities
) -> SpecResources:
    """What is left after lowering.

    Raises:
        CapabilityError: The target verifies nothing.
        ConfigError: The speculator's answer is above what it declared, or above what the target verifies.
        SpeculatorError: The hook failed.
    """
    with _start_up_hook(speculation, "adapt_resources"):
        return lower_resources(speculation, declared, capabilities)


def create_speculator(
    speculation: SpeculatorConfig,
    declared: SpecResources,
    effective: SpecResources,
    host: DraftHost,
    device: torch.device,
) -> BaseSpeculator:
    """The speculator, bound to its effective resources.

    Raises:
        SpeculatorError: A hook failed, or answered something else than a speculator.
    """
    with _start_up_hook(speculation, "create"):
        speculator = speculation.create(declared, host, device)
        _check_answer(speculation, "create", speculator, BaseSpeculator)
    with _start_up_hook(speculator, "bind_resources"):
        speculator.bind_resources(effective)
    return speculator


def _check_answer(owner: object, hook: str, answer: object, wanted: type) -> None:
    if not isinstance(answer, wanted):
        cause = f"it returned {answer!r:.200}: must be a {wanted.__name__}"
        raise SpeculatorError(type(owner).__name__, hook, (), cause)


@contextmanager
def _start_up_hook(owner: object, hook: str) -> Iterator[None]:
    """Name the speculator and its hook when it fails; errors that already say what to change pass as they are."""
    try:
        yield
    except SpecRoundError:
        raise
    except (Exception, SystemExit) as error:
        raise SpeculatorError(type(owner).__name__, hook, (), f"{type(error).__name__}: {error}") from error
