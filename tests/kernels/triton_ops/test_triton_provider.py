"""The Triton kernels as the built-in ones of a GPU and as a provider that runs anywhere."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specround import LLM, SamplingParams, register_speculator
from specround.contract import LayerDescriptor
from specround.kernels import gpu
from specround.kernels.kv_cache import naive
from specround.kernels.reference import ReferenceAttention, ReferencePagedCommit
from specround.kernels.registry import KernelRegistry
from specround.speculators.suffix_tree import SuffixTreeConfig
from tiny_models import tiny_llama

FULL, COMMIT = "attention:full/verify", "layout:paged_token/commit"


@register_speculator("suffix_on_triton")
@dataclass(frozen=True, kw_only=True)
class SuffixOnTriton(SuffixTreeConfig):
    """`suffix_tree` whose attention and commit run in Triton."""

    spec_kernel_providers = (gpu.triton_kernels,)


def test_a_gpu_gets_the_triton_kernels() -> None:
    """On "cuda" the built-in attention, commit and write are Triton's, every other key keeps the reference."""
    registry, reference = KernelRegistry(device_type="cuda"), KernelRegistry()
    for key in ("attention:full/verify", "attention:sliding/verify", "attention:mla/verify"):
        assert type(registry.get(key)) is gpu.TritonAttention
    assert type(registry.get(COMMIT)) is gpu.TritonPagedCommit
    assert registry.write_kv is gpu.write_kv
    assert type(registry.get("conv:short@slots/verify")) is type(reference.get("conv:short@slots/verify"))
    assert type(reference.get(FULL)) is ReferenceAttention
    assert reference.write_kv is naive.write_kv
    layer = LayerDescriptor(name="layer", verify_key=FULL, features=frozenset({"alibi"}))
    assert registry.limit(layer) == reference.limit(layer)


def test_without_triton_the_reference_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU machine without Triton runs the reference ops and says so in one line."""
    monkeypatch.setitem(sys.modules, "specround.kernels.gpu", None)
    monkeypatch.delattr("specround.kernels.gpu")
    with caplog.at_level(logging.INFO, logger="specround"):
        registry = KernelRegistry(device_type="cuda")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no Triton kernels" in caplog.text
    assert type(registry.get(FULL)) is ReferenceAttention
    assert type(registry.get(COMMIT)) is ReferencePagedCommit
    assert registry.write_kv is naive.write_kv


def test_the_engine_generates_the_same_with_the_provider(tmp_path: Path, device: torch.device) -> None:
    """Trees verified and committed by the provider's kernels leave the tokens of plain decoding in plain torch."""
    path = str(tiny_llama(tmp_path, seed=1, vocab_size=24))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in ([3, 4, 5, 6, 3, 4, 5, 6, 3], [7, 8, 7, 8, 7])]
    settings = {"max_model_len": 64, "device": device.type, "dtype": "float32"}
    plain = [output.outputs[0].token_ids for output in LLM(path, **settings).generate(prompts, params)]
    config = {"method": "suffix_on_triton", "num_speculative_tokens": 5, "suffix_decoding_max_spec_factor": 4.0}
    llm = LLM(path, config, record_rounds=True, **settings)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert type(llm.engine.model.layers[0]._kernel) is gpu.TritonAttention
    assert max(len(trace.token_ids) for output in outputs for trace in output.rounds) > 3
