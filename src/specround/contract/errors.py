"""The exception tree: every error specround raises on purpose, and what each one means to a caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SpecRoundError(Exception):
    """Base of every error raised on purpose."""


class FieldError(SpecRoundError, ValueError):
    """A value was refused.

    Args:
        field: Name of the field, as the user wrote it.
        value: The refused value.
        allowed: What would have been accepted, as a phrase ("an integer >= 1").

    Example:
        >>> raise ConfigError("num_speculative_tokens", 0, "an integer >= 1")
        Traceback (most recent call last):
        specround.contract.errors.ConfigError: num_speculative_tokens=0: must be an integer >= 1
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}={_shorten(value)}: must be {allowed}")

    def __reduce__(self) -> tuple[type[FieldError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


class ConfigError(FieldError):
    """An engine, speculator or resource setting is out of range or unknown."""


class RequestError(FieldError):
    """One request is malformed; in a batch only that request fails."""


class ModelError(FieldError):
    """A model cannot be loaded: unknown type, missing or corrupt file, something the hook does not cover."""


class CapabilityError(SpecRoundError):
    """The target model's layers cannot verify what was asked for (for example a Mamba1 layer)."""


class PlanError(SpecRoundError, ValueError):
    """A verify plan or an accept result breaks the contract; names request, column and values.

    Args:
        message: What is wrong; requests are named by their place in the step's batch.
        batch_idx: Place in the batch of the request at fault, so that the engine can name it, or None.
    """

    def __init__(self, message: str, batch_idx: int | None = None) -> None:
        self.batch_idx = batch_idx
        super().__init__(message)


class KernelError(SpecRoundError, ValueError):
    """A kernel provider named an unknown key or returned something that is not a kernel."""


class SpeculatorError(SpecRoundError, RuntimeError):
    """A speculator's hook failed; the engine has returned every block and is stopped.

    Args:
        speculator: Class name of the speculator or of its config.
        hook: Name of the hook that failed.
        request_ids: Requests that were running or waiting and failed with it.
        cause: What went wrong, in words.
    """

    def __init__(self, speculator: str, hook: str, request_ids: Sequence[str], cause: str) -> None:
        self.speculator, self.hook, self.request_ids, self.cause = speculator, hook, tuple(request_ids), cause
        shown = ", ".join(map(repr, self.request_ids[:8])) + (" ..." if len(self.request_ids) > 8 else "")
        super().__init__(f"{speculator}.{hook} failed: {cause} (requests failed: {shown or 'none'})")

    def naming(self, request_ids: Iterable[str], batch: Sequence[str] = ()) -> SpeculatorError:
        """The same failure with the requests that it ended, for a host that knows them.

        Args:
            request_ids: Requests that failed with the hook.
            batch: Requests of the step in batch order, to name the one whose plan was refused.
        """
        cause = self.cause
        at_fault = self.__cause__.batch_idx if isinstance(self.__cause__, PlanError) else None
        if at_fault is not None and at_fault < len(batch):
            cause += f" (batch place {at_fault} is request {batch[at_fault]!r})"
        return SpeculatorError(self.speculator, self.hook, tuple(request_ids), cause)

    def __reduce__(self) -> tuple[type[SpeculatorError], tuple[str, str, tuple[str, ...], str]]:
        return type(self), (self.speculator, self.hook, self.request_ids, self.cause)


class EngineStoppedError(SpecRoundError, RuntimeError):
    """The engine was stopped by an earlier failure or by shutdown and takes no more requests."""


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a value whose own repr fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else text[:197] + "..."
