"""The fused decoder and packed projections: same function, no second copy of the weights, bounded rounding."""

from __future__ import annotations

import pytest
import torch

from specround import LLM, SamplingParams
from specround.contract import ConfigError
from specround.models.linear import DenseLinear, Int4Linear, Int8Linear, make_projection
from tiny_models import tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("fused"), hidden=64, seed=3))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize(("kind", "limit"), [(Int8Linear, 0.02), (Int4Linear, 0.15)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_projections_approximate_the_dense_one(
    rows: int, kind: type[Int8Linear | Int4Linear], limit: float, with_bias: bool
) -> None:
    """Packing to 8 and 4 bits keeps the product within the rounding of its levels, for any number of rows."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=generator)
    bias = torch.randn(48, generator=generator) if with_bias else None
    x = torch.randn(rows, 64, generator=generator)
    packed = kind(weight, None if bias is None else bias.bfloat16())
    error = relative_error(packed(x.bfloat16()), DenseLinear(weight, bias)(x))
    assert 0 < error < limit


def test_a_wrong_scale_would_be_noticed() -> None:
    """Negative control: the same comparison fails when one group's scale is wrong."""
    weight, x = torch.randn(48, 64), torch.randn(3, 64)
    packed = Int4Linear(weight)
    packed.scale_and_zero[0] *= 2
    assert relative_error(packed(x.bfloat16()), DenseLinear(weight)(x)) > 0.15


def test_shapes_int4_cannot_pack_are_packed_to_int8() -> None:
    """An odd number of inputs or outputs still gives a working projection."""
    assert isinstance(make_projection(torch.randn(24, 32), None, "int4"), Int8Linear)
    assert isinstance(make_projection(torch.randn(16, 40), None, "int4"), Int8Linear)
    assert isinstance(make_projection(torch.randn(16, 32), None, "int4"), Int4Linear)


def test_merged_weights_are_the_modules_own(checkpoint: str) -> None:
    """Q, K and V, and gate and up, are views of one weight: fusion stores nothing twice."""
    weights = LLM(checkpoint, max_model_len=32).engine.model.named_parameters()
    layer = "model.layers.0."
    for names in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
        parts = [weights[f"{layer}{name}.weight"] for name in names]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [n, n + 7, n + 3, n]} for n in range(1, 41)]


def first_tokens(checkpoint: str, **settings: object) -> list[int]:
    outputs = LLM(checkpoint, max_model_len=64, **settings).generate(PROMPTS, FIRST)
    return [output.outputs[0].token_ids[0] for output in outputs]


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.8), ("int4", 0.3)])
def test_a_quantised_model_answers_like_the_dense_one(checkpoint: str, quantization: str, least: float) -> None:
    """Most first tokens of a packed model are the dense bfloat16 model's; chance would give one in 64."""
    dense = first_tokens(checkpoint, dtype="bfloat16")
    packed = first_tokens(checkpoint, quantization=quantization)
    assert len(set(dense)) > 5
    agreed = sum(a == b for a, b in zip(packed, dense, strict=True)) / len(dense)
    assert agreed >= least, agreed


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_model_verifies_trees(checkpoint: str, quantization: str) -> None:
    """A packed model verifies drafts: one that drafts for itself in bfloat16 has many of them accepted."""
    speculation = {"method": "draft_model", "model": checkpoint, "num_speculative_tokens": 6, "max_branching": 3}
    llm = LLM(checkpoint, speculation, max_model_len=64, quantization=quantization)
    output = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    assert output.metrics.accepted > 5


def test_bad_quantization_settings_are_refused(checkpoint: str) -> None:
    """Unknown kinds and a dtype that packed weights do not compute in are errors that name field and value."""
    with pytest.raises(ConfigError, match="quantization='int3'"):
        LLM(checkpoint, quantization="int3")
    with pytest.raises(ConfigError, match=r"dtype='float32'.*quantization"):
        LLM(checkpoint, dtype="float32", quantization="int8")
