"""The public surface is a list, errors are one tree, and the contract imports without torch."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import specround
import specround.contract as contract
from specround.contract import errors

PACKAGE_NAMES = [
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

CONTRACT_NAMES = [
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


def test_the_names_of_the_package_are_these() -> None:
    """Adding or dropping a public name is a decision, made by changing this list."""
    assert sorted(specround.__all__) == sorted(PACKAGE_NAMES)
    assert dir(specround) == sorted(PACKAGE_NAMES)


def test_the_names_of_the_contract_are_these() -> None:
    """Every listed name exists, nothing is listed twice, and the list is the one above."""
    assert sorted(contract.__all__) == sorted(CONTRACT_NAMES)
    assert all(hasattr(contract, name) for name in contract.__all__)


@pytest.mark.parametrize("name", sorted(set(PACKAGE_NAMES) & set(CONTRACT_NAMES)))
def test_the_package_passes_on_the_contracts_objects(name: str) -> None:
    """`specround.X` is the contract's X and not a copy."""
    assert getattr(specround, name) is getattr(contract, name)


def test_unknown_names_are_attribute_errors() -> None:
    """The lazy module answers like any other module."""
    assert not hasattr(specround, "Nothing")
    with pytest.raises(AttributeError, match="module 'specround' has no attribute 'Nothing'"):
        _ = specround.Nothing


HEAVY = ("torch", "numpy", "transformers", "triton", "rich", "safetensors")


def heavy_modules(statement: str) -> list[str]:
    """Heavy modules that are loaded after a statement in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import specround",
        "import specround.contract",
        "from specround import VerifyPlan, SpeculatorConfig, register_speculator",
        "import specround.contract as c; c.SpecResources(max_candidates=3); c.known_methods()",
    ],
)
def test_the_contract_imports_without_torch(statement: str) -> None:
    """A speculator's host side, its config and its policies load nothing heavy."""
    assert heavy_modules(statement) == []


def test_the_import_check_sees_torch() -> None:
    """Negative control: a module that needs torch is reported."""
    assert "torch" in heavy_modules("import specround.kernels.tree")


ERRORS = [
    errors.SpecRoundError("text"),
    errors.FieldError("field", 3, "an integer >= 4"),
    errors.ConfigError("field", [1, 2], "a tuple"),
    errors.RequestError("prompt", "", "not empty"),
    errors.ModelError("model", "x", "a directory"),
    errors.CapabilityError("text"),
    errors.PlanError("text"),
    errors.KernelError("text"),
    errors.SpeculatorError("Mine", "propose", ["a", "b"], "ZeroDivisionError: division by zero"),
    errors.EngineStoppedError("text"),
]


def test_every_error_is_listed_and_under_one_base() -> None:
    """One `except SpecRoundError` catches all, and the samples here cover every class of the module."""
    classes = {thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)}
    assert {type(error) for error in ERRORS} == classes
    assert all(isinstance(error, errors.SpecRoundError) for error in ERRORS)
    values = (errors.FieldError, errors.PlanError, errors.KernelError)
    assert all(isinstance(error, ValueError) == isinstance(error, values) for error in ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_a_process_boundary(error: Exception) -> None:
    """Engine core and front end may be two processes: class, text and fields come back."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_field_errors_show_field_value_and_what_is_allowed() -> None:
    """The three parts are attributes too; a huge value is shortened in the text and kept in the attribute."""
    error = errors.ConfigError("widths", list(range(1000)), "short")
    assert (error.field, error.allowed) == ("widths", "short")
    assert error.value == list(range(1000))
    assert str(error).startswith("widths=[0, 1, 2")
    assert str(error).endswith("...: must be short")
    assert len(str(error)) < 250


@pytest.mark.parametrize(("count", "shown"), [(0, "none"), (2, "'r0', 'r1'"), (9, "'r7' ...")])
def test_speculator_errors_name_speculator_hook_and_requests(count: int, shown: str) -> None:
    """The failed requests are listed, at most eight in the text and all in the attribute."""
    error = errors.SpeculatorError("Mine", "plan", [f"r{i}" for i in range(count)], "boom")
    assert str(error).startswith("Mine.plan failed: boom (requests failed: ")
    assert str(error).endswith(f"{shown})")
    assert len(error.request_ids) == count
