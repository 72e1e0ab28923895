"""Running the V2 runner's Triton kernels on a CPU, in Triton's interpreter: slow, but enough to compare tokens.

vLLM uses Triton only when some backend of it says that it is active, and the interpreter needs boolean masks in masked
loads and stores, where compiled kernels accept integers.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar


class _InterpreterDriver:
    """Says that Triton can run here."""

    @staticmethod
    def is_active() -> bool:
        return True


class _InterpreterBackend:
    """The entry of Triton's table of backends that vLLM looks at."""

    driver: ClassVar[type] = _InterpreterDriver
    compiler: ClassVar[None] = None


def allow_interpreter_on_cpu() -> bool:
    """Make vLLM, imported after this, run its Triton kernels in the interpreter. `TRITON_INTERPRET=1` must be set.

    Returns:
        Whether it was allowed before.

    Raises:
        ImportError: Triton is not installed.
    """
    backends: Any = importlib.import_module("triton.backends")
    backends.backends.setdefault("cpu", _InterpreterBackend)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "takes_integer_masks", False):
        return True
    for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), place))
    builder.takes_integer_masks = True
    return False


def _with_boolean_mask(method: Any, place: int) -> Any:
    def with_boolean_mask(self: Any, pointers: Any, *arguments: Any, **named: Any) -> Any:
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return method(self, pointers, *arguments, **named)

    return with_boolean_mask
