"""Bad input: a clear error with field, value and what is allowed; nothing half done; in a batch it fails alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from plain_reference import Ask, PlainReference, check_at_rest

from specround import LLM, SamplingParams
from specround.contract import ConfigError, ModelError, RequestError


@pytest.fixture(scope="module")
def llm(target: PlainReference) -> LLM:
    return LLM(target.path, {"method": "ngram", "num_speculative_tokens": 3}, max_model_len=16)


def ids(*tokens: object) -> dict[str, list[object]]:
    return {"prompt_token_ids": list(tokens)}


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": (ids(), "prompt=.*at least one token"),
    "too long": (ids(*[5] * 16), "prompt length=16: must be at most 15"),
    "far too long": (ids(*[5] * 500), "prompt length=500"),
    "beyond the vocabulary": (ids(5, 24), "prompt_token_ids=24: must be integers of 0 to 23"),
    "negative id": (ids(-1), "prompt_token_ids=-1"),
    "float id": (ids(1.0), "prompt_token_ids=1.0"),
    "boolean id": (ids(True), "prompt_token_ids=True"),
    "ids that are no list": ({"prompt_token_ids": "abc"}, "prompt_token_ids='abc': must be a list"),
    "no prompt": ({}, "exactly one of"),
    "two prompts": ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one of"),
    "unknown key": ({"prompt_ids": [1]}, "exactly one of"),
    "text without a tokenizer": ("hello", "token ids: this model has no tokenizer"),
    "a number": (5, "a string"),
    "none": (None, "a string"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_alone_raises(name: str, llm: LLM) -> None:
    """One request, refused: the call raises, and the engine is as before."""
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))
    check_at_rest(llm)


def test_bad_prompts_in_a_batch_fail_alone(llm: LLM, target: PlainReference) -> None:
    """Bad ones carry their error; the good ones between them are complete; the order is kept."""
    good = [Ask((3 + n, 4), 5) for n in range(len(BAD_PROMPTS))]
    prompts, params = [], []
    for ask, (prompt, _) in zip(good, BAD_PROMPTS.values(), strict=True):
        prompts += [prompt, ask.as_prompt]
        params += [ask.params, ask.params]
    outputs = llm.generate(prompts, params)
    for output, (_, message) in zip(outputs[::2], BAD_PROMPTS.values(), strict=True):
        assert isinstance(output.error, RequestError)
        assert output.finished
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == []
        with pytest.raises(RequestError, match=message):
            raise output.error
    assert [tuple(output.outputs[0].token_ids) for output in outputs[1::2]] == target.answers(good)
    assert all(output.error is None for output in outputs[1::2])
    check_at_rest(llm)


def test_duplicate_ids_in_a_batch(llm: LLM, target: PlainReference) -> None:
    """The second request of an id fails alone; the id is free again afterwards."""
    asks = [Ask((5, 6), 4), Ask((7, 8), 4), Ask((9,), 4)]
    for _ in range(2):
        outputs = llm.generate([a.as_prompt for a in asks], [a.params for a in asks], request_ids=["a", "a", "b"])
        assert [output.error is None for output in outputs] == [True, False, True]
        assert "request_id='a'" in str(outputs[1].error)
        answers = target.answers(asks)
        assert [tuple(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [answers[0], answers[2]]
    check_at_rest(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "request_ids", "message"),
    [
        (7, None, None, "prompts=7"),
        ([ids(5)], [SamplingParams()] * 2, None, "sampling_params=.*list of 1"),
        ([ids(5)], ["greedy"], None, "sampling_params"),
        ([ids(5)], {"temperature": 0}, None, "sampling_params"),
        ([ids(5)], None, ["a", "b"], "request_ids=.*list of 1"),
        ([ids(5)], None, [7], "request_ids"),
        ([ids(5)], None, "a", "request_ids"),
    ],
)
def test_arguments_that_do_not_fit(prompts: Any, params: Any, request_ids: Any, message: str, llm: LLM) -> None:
    """Lists of other lengths or of other things are refused before anything starts."""
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, request_ids=request_ids)
    check_at_rest(llm)


def test_nothing_to_do(llm: LLM) -> None:
    """No prompts, no outputs."""
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be a number from 0 to 1000000"),
        ({"temperature": 1e39}, r"temperature=1e\+39: must be a number from 0 to 1000000"),
        ({"temperature": 1000000.5}, "temperature=1000000.5"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"temperature": 10**5000}, "temperature=<int>: must be"),
        ({"temperature": -math.inf}, "temperature=-inf"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": None}, "temperature=None"),
        ({"seed": 1.5}, "seed=1.5: must be an integer or None"),
        ({"seed": "a"}, "seed='a'"),
        ({"seed": True}, "seed=True"),
        ({"max_tokens": 0}, "max_tokens=0: must be an integer >= 1"),
        ({"max_tokens": -3}, "max_tokens=-3"),
        ({"max_tokens": 2.0}, "max_tokens=2.0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"stop": ""}, "stop=''"),
        ({"stop": ["a", ""]}, "stop="),
        ({"stop": [1]}, "stop="),
        ({"stop": 5}, "stop=5"),
        ({"stop": "a", "detokenize": False}, "stop='a': must be None when detokenize is False"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"n": 2}, "n=2: must be 1: other values are not supported yet"),
        ({"n": 0}, "n=0"),
        ({"top_p": 0.9}, "top_p=0.9: must be 1.0"),
        ({"top_p": np.array([0.9, 1.0])}, "top_p=array.*must be 1.0"),
        ({"top_p": np.float64(0.9)}, "top_p=.*0.9"),
        ({"top_p": True}, "top_p=True"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"top_k": 5}, "top_k=5"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"presence_penalty": 1.0}, "presence_penalty=1.0"),
        ({"frequency_penalty": -1}, "frequency_penalty=-1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens=3"),
        ({"logprobs": 0}, "logprobs=0"),
        ({"logprobs": 5}, "logprobs=5"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"logit_bias": np.zeros(3)}, "logit_bias=array"),
        ({"bad_words": np.array([])}, "bad_words=array"),
        *(
            ({name: value}, f"{name}={value!r}: must be True or False")
            for name in ("ignore_eos", "detokenize", "include_stop_str_in_output", "skip_special_tokens")
            for value in ("no", 1, None)
        ),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_sampling_params(values: dict[str, Any], message: str) -> None:
    """Out of range or not supported yet: refused by name, never ignored."""
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        *({"top_k": -1}, {"top_p": 1}, {"top_p": np.float32(1)}, {"bad_words": []}, {"stop": []}, {"stop": None}),
        *({"seed": -(2**70)}, {"temperature": 1e6}, {"temperature": 1e-30}, {"temperature": np.float64(0.5)}),
    ],
    ids=str,
)
def test_neutral_values_are_accepted(values: dict[str, Any], llm: LLM) -> None:
    """What asks for nothing is no error; any integer is a seed."""
    llm.generate(ids(5), SamplingParams(max_tokens=2, **values))


def test_params_that_do_not_fit_the_model(llm: LLM) -> None:
    """A stop string without tokenizer and a stop id beyond the vocabulary are refused per request."""
    with pytest.raises(RequestError, match=r"stop=.*no tokenizer"):
        llm.generate(ids(5), SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="stop_token_ids=24: must be below 24"):
        llm.generate(ids(5), SamplingParams(stop_token_ids=[24]))
    with pytest.raises(RequestError, match="messages"):
        llm.chat([{"role": "user", "content": "hi"}])
    check_at_rest(llm)


def test_seeds_are_taken_modulo_2_to_the_64(llm: LLM) -> None:
    """Equal seeds modulo 2^64 are equal seeds, negative ones included."""
    seeds = [7, 7 + 2**64, 7 - 2**64]
    outputs = llm.generate([ids(5)] * 3, [SamplingParams(seed=seed, max_tokens=10) for seed in seeds])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "K of 0": ({"speculative_config": NGRAM | {"num_speculative_tokens": 0}}, "num_speculative_tokens=0.*>= 1"),
    "K below 0": ({"speculative_config": NGRAM | {"num_speculative_tokens": -1}}, "num_speculative_tokens=-1"),
    "K of no integer": ({"speculative_config": NGRAM | {"num_speculative_tokens": 2.0}}, "num_speculative_tokens=2.0"),
    "K that is true": ({"speculative_config": NGRAM | {"num_speculative_tokens": True}}, "num_speculative_tokens=True"),
    "K missing": ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens=None.*given"),
    "method missing": ({"speculative_config": {"num_speculative_tokens": 3}}, "'method', one of .*ngram"),
    "unknown method": ({"speculative_config": NGRAM | {"method": "ngrams"}}, "did you mean 'ngram'"),
    "method of another type": ({"speculative_config": NGRAM | {"method": 5}}, "method=5"),
    "unknown field": ({"speculative_config": NGRAM | {"lookup": 5}}, "speculative_config.lookup=5.*prompt_lookup_max"),
    "no mapping": ({"speculative_config": "ngram"}, "speculative_config='ngram'"),
    "bad schedule": (
        {"speculative_config": NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2, 9]]}},
        "num_speculative_tokens_per_batch_size",
    ),
    "tree of 64 drafts": (
        {"speculative_config": {"method": "recall", "num_speculative_tokens": 64}},
        "max_candidates=65: must be at most 64",
    ),
    "too few blocks": (
        {"num_blocks": 1, "max_model_len": 64},
        "num_blocks=1: must be enough for one request.*4 blocks",
    ),
    "too little memory": ({"kv_cache_memory_bytes": 10, "max_model_len": 64}, "kv_cache_memory_bytes=10"),
    "both sizes": ({"kv_cache_memory_bytes": 10**6, "num_blocks": 9}, "num_blocks=9: must be None when"),
    "no blocks": ({"num_blocks": 0}, "num_blocks=0: must be an integer >= 1"),
    "block size": ({"block_size": 0}, "block_size=0"),
    "no sequences": ({"max_num_seqs": 0}, "max_num_seqs=0"),
    "token budget below sequences": ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "at least max_num_seqs=8"),
    "context of 1": ({"max_model_len": 1}, "max_model_len=1: must be at least 2"),
    "context beyond the model": ({"max_model_len": 257}, "max_model_len=257: must be at most 256"),
    "unknown setting": (
        {"tensor_parallel_size": 2},
        "tensor_parallel_size=2: must be one of the settings .*block_size",
    ),
    "unknown dtype": ({"dtype": "float8"}, "dtype='float8'"),
    "unknown device": ({"device": "tpu"}, "device='tpu'"),
    "graphs on a CPU": ({"cuda_graphs": True, "device": "cpu"}, "cuda_graphs=True: must be False on a CPU"),
    "seed": ({"seed": "x"}, "seed='x'"),
    **{
        f"{name} that is {value!r}": ({name: value}, f"{name}={value!r}: must be True")
        for name in ("async_scheduling", "check_values", "record_rounds", "cuda_graphs")
        for value in ("no", 1, 0)
    },
    "cuda_graphs that is None": ({"cuda_graphs": None}, "cuda_graphs=None: must be True or False"),
    "huge pool": ({"num_blocks": 10**12}, "num_blocks=1000000000000: must be at most 16777216"),
    "pool above the memory": (
        {"num_blocks": 2**24, "block_size": 4096},
        "num_blocks=16777216: must be smaller: a KV pool of 16777216 blocks .* cpu has [0-9]+ bytes free",
    ),
    "huge memory": ({"kv_cache_memory_bytes": 10**16}, "kv_cache_memory_bytes=10000000000000000: must be at most"),
    "memory above the machine's": (
        {"kv_cache_memory_bytes": 10**13, "block_size": 4096},
        "kv_cache_memory_bytes=10000000000000: must be smaller: a KV pool of .* bytes free",
    ),
    "huge crowd": ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000: must be at most 4096"),
    "huge steps": ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens=1000000000: must be at most 1048576"),
    "huge blocks": ({"block_size": 10**9}, "block_size=1000000000: must be at most 4096"),
    "huge K": (
        {"speculative_config": NGRAM | {"num_speculative_tokens": 10**10}},
        "num_speculative_tokens=10000000000: must be at most 4096",
    ),
    "quantization": ({"quantization": "int3"}, "quantization='int3': must be None, 'int8', 'int4' or 'w8a8'"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings(name: str, target: PlainReference) -> None:
    """A setting that is unknown, out of range, or does not fit: an error with field, value and what is allowed."""
    settings, message = BAD_SETTINGS[name]
    with pytest.raises((ConfigError, ModelError), match=message):
        LLM(target.path, **settings)


@pytest.mark.parametrize("model", ["", None, 7])
def test_a_model_that_is_no_name(model: Any) -> None:
    """The model is a non-empty string."""
    with pytest.raises(ConfigError, match="model="):
        LLM(model)


def test_a_drafter_that_cannot_be_loaded(target: PlainReference, tmp_path: Any) -> None:
    """The drafter's own error reaches the user: it says which path is wrong."""
    config = {"method": "draft_model", "model": str(tmp_path / "nowhere"), "num_speculative_tokens": 3}
    with pytest.raises((ModelError, ConfigError), match="nowhere"):
        LLM(target.path, config)
