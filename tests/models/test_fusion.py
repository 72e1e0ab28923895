"""The fused decoder and packed projections: same function, no second copy of the weights, bounded rounding."""

from __future__ import annotations

import pytest
import torch

from specround import LLM, SamplingParams
from specround.bench.batches import BatchPrompts
from specround.bench.gate import check_speculator
from specround.bench.variants import EngineVariant
from specround.contract import ConfigError
from specround.models.linear import DenseLinear, Int4Linear, Int8Linear, PackedLinear, W8A8Linear, make_projection
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_w8a8_approximates_the_dense_projection(dtype: torch.dtype, with_bias: bool) -> None:
    """Eight bits on both sides stay within 2 % of the dense product, and a row of zeros gives the bias."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(9, 64, generator=generator).to(dtype)
    x[4] = 0
    found = W8A8Linear(weight, bias)(x)
    assert found.dtype == dtype
    expected = DenseLinear(weight.float(), None if bias is None else bias.float())(x.float())
    assert 0 < relative_error(found, expected) < 0.02
    assert torch.equal(found[4], torch.zeros(48, dtype=dtype) if bias is None else bias)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_bfloat16_is_the_dense_product(rows: int, with_bias: bool) -> None:
    """Packing changes the order of the weights only: the product is bfloat16's, for any number of rows."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 96, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if with_bias else None
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    packed = make_projection(weight, bias, None)
    assert isinstance(packed, PackedLinear) == PackedLinear.fits(weight)
    expected = DenseLinear(weight.float(), None if bias is None else bias.float())(x.float())
    assert 0 < relative_error(packed(x), expected) < 0.01
    assert relative_error(packed(x), expected.roll(1, -1)) > 0.5


def test_w8a8_rows_do_not_depend_on_their_neighbours() -> None:
    """A row has the same bits alone and among others, however large those are: scales are per row, sums are exact."""
    generator = torch.Generator().manual_seed(6)
    projection = W8A8Linear(torch.randn(96, 64, generator=generator))
    x = torch.randn(40, 64, generator=generator)
    x[7] *= 1e4
    together = projection(x)
    for rows in (slice(0, 1), slice(3, 5), slice(9, 26)):
        assert torch.equal(projection(x[rows]), together[rows])
    x[0, 0] += 0.5
    assert not torch.equal(projection(x[:1]), together[:1])


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
    assert isinstance(make_projection(torch.randn(16, 40), None, "w8a8"), W8A8Linear)


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


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.8), ("int4", 0.3), ("w8a8", 0.8)])
def test_a_quantised_model_answers_like_the_dense_one(checkpoint: str, quantization: str, least: float) -> None:
    """Most first tokens of a packed model are the dense bfloat16 model's; chance would give one in 64."""
    dense = first_tokens(checkpoint, dtype="bfloat16")
    packed = first_tokens(checkpoint, quantization=quantization)
    assert len(set(dense)) > 5
    agreed = sum(a == b for a, b in zip(packed, dense, strict=True)) / len(dense)
    assert agreed >= least, agreed


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_a_quantised_model_verifies_trees(checkpoint: str, quantization: str) -> None:
    """A packed model verifies drafts: one that drafts for itself, unpacked, has many of them accepted."""
    speculation = {"method": "draft_model", "model": checkpoint, "num_speculative_tokens": 6, "max_branching": 3}
    llm = LLM(checkpoint, speculation, max_model_len=64, quantization=quantization)
    output = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    assert output.metrics.accepted > 5


SPECULATORS = [
    {"method": "suffix_tree", "num_speculative_tokens": 12},
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
]


@pytest.mark.parametrize("speculation", SPECULATORS, ids=lambda speculation: speculation["method"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_w8a8_identity(checkpoint: str, speculation: dict[str, object], temperature: float) -> None:
    """The same packed model generates the same tokens with speculation and without, greedy and seeded."""
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=40, ignore_eos=True)
    settings = {"max_model_len": 64, "quantization": "w8a8", "max_num_seqs": 5}
    plain = LLM(checkpoint, **settings).generate(PROMPTS[:12], params)
    drafted = LLM(checkpoint, speculation, **settings).generate(PROMPTS[:12], params)
    assert [output.outputs[0].token_ids for output in drafted] == [output.outputs[0].token_ids for output in plain]
    assert sum(output.metrics.accepted for output in drafted) > 10


@pytest.mark.usefixtures("smollm2")
def test_w8a8_identity_needs_scores_in_float64() -> None:
    """Negative control: with scores in float32, logits of one row and of many differ, with float64 they do not."""

    def logits(llm: LLM) -> torch.Tensor:
        model, seen = llm.engine.model, []
        original = model.logits
        model.logits = lambda hidden: seen.append(original(hidden)) or seen[-1]  # type: ignore[method-assign]
        llm.generate({"prompt_token_ids": list(range(1, 49))}, SamplingParams(temperature=0, max_tokens=1))
        model.logits = original  # type: ignore[method-assign]
        return seen[-1][-1]

    found = {}
    engines = [
        LLM("smollm2", max_model_len=64, quantization="w8a8", max_num_seqs=1, max_num_batched_tokens=rows)
        for rows in (48, 7)
    ]
    for dtype in (torch.float64, torch.float32):
        for llm in engines:
            llm.engine.model._fused._score_dtype = dtype
        one, two = map(logits, engines)
        found[dtype] = torch.equal(one, two)
    assert found == {torch.float64: True, torch.float32: False}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weight_only_identity_up_to_ties(checkpoint: str, quantization: str) -> None:
    """In bfloat16 a speculator may part from plain decoding only where two logits are within the rounding of a tie."""
    settings = {"max_model_len": 64, "quantization": quantization}
    plain, drafted = (
        EngineVariant(name, LLM(checkpoint, speculation, **settings), max_tokens=40, ignore_eos=True)
        for name, speculation in (("plain", None), ("suffix_tree", SPECULATORS[0]))
    )
    prompts = [tuple(prompt["prompt_token_ids"]) for prompt in PROMPTS[:12]]
    batch = BatchPrompts(kind="any", ids=tuple(map(str, range(12))), token_ids=tuple(prompts))
    runs = [[variant.run(prompts)] for variant in (plain, drafted)]
    report = check_speculator("suffix_tree", plain, [batch], *runs)
    assert report["required"] == "ties"
    assert report["equal_share"] >= 0.5, report


def test_bad_quantization_settings_are_refused(checkpoint: str) -> None:
    """Unknown kinds and a dtype that packed weights do not compute in are errors that name field and value."""
    with pytest.raises(ConfigError, match="quantization='int3'"):
        LLM(checkpoint, quantization="int3")
    with pytest.raises(ConfigError, match=r"dtype='float32'.*quantization"):
        LLM(checkpoint, dtype="float32", quantization="int8")
