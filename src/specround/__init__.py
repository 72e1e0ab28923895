"""specround: speculative decoding in which the speculator owns the whole round.

Example:
    >>> from specround import LLM, SamplingParams
    >>> llm = LLM("smollm2", speculative_config={"method": "suffix_tree", "num_speculative_tokens": 8})
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].outputs[0].text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specround.version import __version__

if TYPE_CHECKING:
    from specround.contract import (
        AcceptResult,
        BaseSpeculator,
        BudgetView,
        SpecResources,
        SpeculatorConfig,
        StepObservation,
        VerifyPlan,
        register_speculator,
    )
    from specround.engine import LLM, CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "AcceptResult",
    "BaseSpeculator",
    "BudgetView",
    "CompletionOutput",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpecResources",
    "SpeculatorConfig",
    "StepObservation",
    "VerifyPlan",
    "__version__",
    "register_speculator",
]

_ENGINE = {"LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specround' has no attribute {name!r}")
    return getattr(import_module("specround.engine" if name in _ENGINE else "specround.contract"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
