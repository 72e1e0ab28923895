"""A real language model: SmolLM2-135M in float32 against `transformers` and against plain decoding."""

from __future__ import annotations

import adversarial  # noqa: F401
import pytest
import torch

from specround import LLM, RequestOutput, SamplingParams

GREEDY_TOKENS, SAMPLED_TOKENS = 16, 8
PROMPTS = [
    "The",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3,",
    "the cat sat on the mat. the cat sat on the mat. the cat",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
]
"""One short prompt, and three whose continuation repeats them."""

SETTINGS = {"dtype": "float32", "max_model_len": 256, "block_size": 16, "num_blocks": 64, "max_num_seqs": 8}


def both(llm: LLM) -> list[RequestOutput]:
    """Every prompt greedy, then every prompt sampled, in one batch."""
    greedy = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    sampled = [SamplingParams(temperature=0.8, seed=seed, max_tokens=SAMPLED_TOKENS) for seed in range(len(PROMPTS))]
    return llm.generate(PROMPTS * 2, [greedy] * len(PROMPTS) + sampled)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """Plain decoding, checked against transformers' own generate on the same weights before the hook is installed."""
    from specround.models.pretrained import load_pretrained
    from specround.models.sources import resolve_model

    llm = LLM("smollm2", async_scheduling=False, **SETTINGS)
    outputs = both(llm)
    pretrained = load_pretrained(resolve_model("smollm2"), torch.float32, torch.device("cpu"))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        answer = pretrained.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GREEDY_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == answer[0, ids.shape[1] :].tolist()
    return outputs


def test_plain_greedy_equals_transformers(plain: list[RequestOutput]) -> None:
    """Greedy plain decoding is transformers' generate; the text is that of the tokens."""
    assert [len(output.outputs[0].token_ids) for output in plain[: len(PROMPTS)]] == [GREEDY_TOKENS] * len(PROMPTS)
    assert all(output.outputs[0].text for output in plain)


@pytest.mark.parametrize(
    ("config", "late"),
    [
        ({"method": "suffix_tree", "num_speculative_tokens": 15}, True),
        ({"method": "suffix_tree", "num_speculative_tokens": 1, "max_branching": 1}, False),
        ({"method": "ngram", "num_speculative_tokens": 7}, True),
        ({"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 3, "max_branching": 2}, True),
        ({"method": "recall", "num_speculative_tokens": 7}, False),
        ({"method": "adversarial", "num_speculative_tokens": 7}, True),
        ({"method": "adversarial", "num_speculative_tokens": 15, "use_masks": True}, False),
    ],
    ids=lambda value: f"{value['method']}-K{value['num_speculative_tokens']}" if isinstance(value, dict) else "",
)
def test_speculation_changes_no_token(config: dict[str, object], late: bool, plain: list[RequestOutput]) -> None:
    """Greedy and seeded tokens, text and counts equal plain decoding's, and drafts were accepted."""
    if config["method"] == "adversarial":
        answers = {tuple(o.prompt_token_ids): tuple(o.outputs[0].token_ids) for o in plain[: len(PROMPTS)]}
        config = config | {"vocab_size": 1000, "answers": answers}
    llm = LLM("smollm2", config, async_scheduling=late, max_num_batched_tokens=48, **SETTINGS)
    outputs = both(llm)
    assert tokens(outputs) == tokens(plain)
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in plain]
    assert [output.metrics.committed for output in outputs] == [len(ids) for ids in tokens(plain)]
    assert sum(output.metrics.accepted for output in outputs) > 10
    pool = llm.engine.core.scheduler.pool
    assert pool.num_free == pool.num_total
