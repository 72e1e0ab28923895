"""Greedy output is what `transformers` itself generates, with and without an end-of-sequence token."""

from __future__ import annotations

import random

import pytest
import torch
from plain_reference import PlainReference, check_at_rest
from speculator_fleet import MAX_MODEL_LEN, VOCAB, Models

from specround import LLM, SamplingParams

PROMPTS = [[random.Random(n).randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 5, 9, 17, 31)]
NEW_TOKENS = 16


def hf_greedy(reference: PlainReference, prompt: list[int], eos: int | None) -> list[int]:
    """`generate` of transformers."""
    ids = torch.tensor([prompt])
    output = reference.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", [None, "ngram", "suffix_tree", "self_draft", "foreign_tree", "recall"])
def test_greedy_equals_transformers(name: str | None, models: Models) -> None:
    """With end of sequence ignored, and with tokens that occur in the output declared as end of sequence."""
    config = None if name is None else models.config(name, 5)
    llm = LLM(models.target.path, config, max_model_len=MAX_MODEL_LEN)
    free = [hf_greedy(models.target, prompt, None) for prompt in PROMPTS]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == free

    for place in (0, 4, 9):
        stops = [answer[place] for answer in free]
        params = [SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=[stop]) for stop in stops]
        outputs = llm.generate(prompts, [SamplingParams(**vars(p) | {"ignore_eos": True}) for p in params])
        expected = [hf_greedy(models.target, prompt, stop) for prompt, stop in zip(PROMPTS, stops, strict=True)]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    check_at_rest(llm)


def test_the_models_own_end_of_sequence_stops(models: Models, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An end-of-sequence id of the checkpoint ends the text with reason "stop" and no stop reason, unless ignored."""
    from tiny_models import tiny_llama

    free = [hf_greedy(models.target, prompt, None) for prompt in PROMPTS]
    eos = free[3][6]
    path = tiny_llama(tmp_path_factory.mktemp("eos"), seed=1, vocab_size=VOCAB, eos_token_id=[eos, 1])
    llm = LLM(str(path), models.config("self_tree", 7), max_model_len=MAX_MODEL_LEN)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        completion = output.outputs[0]
        expected = models.target.module.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=[eos, 1], pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert completion.token_ids == expected
        stopped = expected[-1] in (eos, 1)
        assert (completion.finish_reason, completion.stop_reason) == ("stop" if stopped else "length", None)
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == free
