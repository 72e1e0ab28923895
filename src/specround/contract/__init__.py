"""The round contract: every type a speculator and an engine exchange. Importable without torch."""

from specround.contract.accept import AcceptResult
from specround.contract.budget import BudgetView
from specround.contract.capabilities import SpecCapabilities, SpecLimit
from specround.contract.discovery import (
    find_speculator,
    known_methods,
    parse_speculative_config,
    register_speculator,
)
from specround.contract.draft import DraftHost, DraftModel, DraftRows
from specround.contract.errors import (
    CapabilityError,
    ConfigError,
    EngineStoppedError,
    FieldError,
    KernelError,
    ModelError,
    PlanError,
    RequestError,
    SpecRoundError,
    SpeculatorError,
)
from specround.contract.kernel import KERNEL_KEYS, KernelProvider, LayerDescriptor, SpecKernel
from specround.contract.observation import RoundStats, StepObservation
from specround.contract.plan import (
    MAX_TREE_COLUMNS,
    PLAN_KINDS,
    PlanKind,
    VerifyPlan,
    min_kind,
    slice_plan,
    trim_draft_tokens,
)
from specround.contract.resources import DraftLayer, SpecResources
from specround.contract.speculator import BaseSpeculator, SpeculatorConfig, overrides
from specround.contract.views import HostStep, PlanView, ProposeView, SamplingView, VerifyOutput

__all__ = [
    "KERNEL_KEYS",
    "MAX_TREE_COLUMNS",
    "PLAN_KINDS",
    "AcceptResult",
    "BaseSpeculator",
    "BudgetView",
    "CapabilityError",
    "ConfigError",
    "DraftHost",
    "DraftLayer",
    "DraftModel",
    "DraftRows",
    "EngineStoppedError",
    "FieldError",
    "HostStep",
    "KernelError",
    "KernelProvider",
    "LayerDescriptor",
    "ModelError",
    "PlanError",
    "PlanKind",
    "PlanView",
    "ProposeView",
    "RequestError",
    "RoundStats",
    "SamplingView",
    "SpecCapabilities",
    "SpecKernel",
    "SpecLimit",
    "SpecResources",
    "SpecRoundError",
    "SpeculatorConfig",
    "SpeculatorError",
    "StepObservation",
    "VerifyOutput",
    "VerifyPlan",
    "find_speculator",
    "known_methods",
    "min_kind",
    "overrides",
    "parse_speculative_config",
    "register_speculator",
    "slice_plan",
    "trim_draft_tokens",
]
