"""`specround models MODEL`: a loaded model's layers."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from specround.contract import LayerDescriptor, SpecLimit, SpecResources, SpeculatorConfig
from tiny_models import tiny_model


class ChainOnly:
    """A kernel that declines trees."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        return SpecLimit("chain", "this kernel knows chains only")

    def bind(self, resources: SpecResources) -> None:
        """Nothing to prepare."""


@pytest.fixture
def chain_kernels(monkeypatch):
    """A speculator that brings its own attention kernel."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SpeculatorConfig):
        spec_kernel_providers = (lambda: {"attention:full/verify": ChainOnly()},)

    module = ModuleType("chain_kernels")
    module.Config = Config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "chain_kernels", module)
    return json.dumps({"method": "chain_kernels:Config", "num_speculative_tokens": 2})


def test_layers_as_json(specround, model):
    """Each layer comes with its plan kind, kernels, providers and memory, and the sum is that of the engine's pool."""
    result = specround("models", model, "--json")
    assert (result.code, result.err) == (0, "")
    described = json.loads(result.out)
    assert (described["model_type"], described["dtype"], described["kind"]) == ("llama", "float32", "mask")
    assert [layer["name"] for layer in described["layers"]] == ["target.0", "target.1"]
    layer = described["layers"][0]
    assert [kernel["key"] for kernel in layer["kernels"]] == ["attention:full/verify", "layout:paged_token/commit"]
    assert layer["kernels"][0]["provider"] == "specround.kernels.reference.ReferenceAttention"
    assert layer["bytes_per_token"] == 2 * (8 + 8) * 4
    assert described["bytes_per_token"] == 2 * layer["bytes_per_token"]


def test_memory_follows_the_dtype(specround, model):
    """In bfloat16 a token takes half the memory of float32."""
    sizes = [
        json.loads(specround("models", model, "--json", "--dtype", dtype).out)["bytes_per_token"]
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes[0] == 2 * sizes[1]


def test_reasons_of_a_kernel_that_declines(specround, model, chain_kernels):
    """With a speculator's kernels, the table says which provider lowers the layer and why."""
    result = specround("models", model, "--speculative-config", chain_kernels)
    assert result.code == 0
    assert "verifies plans up to chain" in result.out
    assert "ChainOnly" in result.out
    assert "this kernel knows chains only" in result.out


def test_equal_neighbours_share_a_row(specround, model, tmp_path):
    """Layers that differ in nothing but their name are one row; a window starts another one."""
    assert "target.0 to target.1" in specround("models", model).out
    mixed = tiny_model(tmp_path / "gemma", "gemma3_text")
    table = specround("models", str(mixed)).out
    assert "window 4" in table
    assert "full" in table
    assert " to " not in table.partition("\n")[2]


def test_speculators_and_models_are_told_apart(specround, model, monkeypatch, tmp_path):
    """A directory called like a speculator does not hide it, and both can be asked for at once."""
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    result = specround("models", "ngram", model)
    assert result.code == 0
    assert "prompt_lookup_max" in result.out
    assert "target.0" in result.out


def test_a_model_that_is_not_there(specround):
    """A path without a model is refused in one line."""
    result = specround("models", "./no-such-model")
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1)
