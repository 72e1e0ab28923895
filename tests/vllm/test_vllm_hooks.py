"""What a speculator's hooks and policies are told inside released vLLM."""

from __future__ import annotations

import json
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from vllm_targets import ENGINE, QUIET

from specround import BaseSpeculator, SpecResources
from specround.integrations.vllm import prepare_environment
from specround.integrations.vllm.limits import sampling_limit
from specround.integrations.vllm.requests import RequestTable
from specround.integrations.vllm.step import RoundSteps
from specround.kernels.reference import ReferencePagedCommit
from specround.round import SpecRound

NUM_BLOCKS = 8
NUM_DRAFTS = 9
ABORTED, LAST_STEP = 1, 4


class Recorded:
    """A run of the recorder: what each request generated, batch by batch, and what the hooks were told."""

    def __init__(self, target, host, batches, **others):
        self.batches, log = batches, target.folder / f"hooks-{host}.jsonl"
        config = {"method": "recorder", "num_speculative_tokens": NUM_DRAFTS, "log_file": str(log)}
        self.made = target.run(f"hooks-{host}", config, host=host, batches=batches, **others)
        self.calls = [json.loads(line) for line in log.read_text().splitlines()]

    def told(self, *hooks):
        return [call for call in self.calls if call["hook"] in hooks]

    @property
    def num_generated(self):
        return sum(len(tokens) for batch in self.made["tokens"] for tokens in batch)

    @property
    def rows(self):
        """The first numbers of a committed row's hidden state, by the tokens up to it."""
        return {tuple(known): numbers for call in self.told("propose") for known, numbers in call["rows"]}


@pytest.fixture(scope="module")
def batches(llama):
    """Requests that do not fit into seven blocks, then one request, with which the last of them are told to leave."""
    return [[ask | {"max_tokens": 60} for ask in llama.asks[:5]], [llama.asks[3]]]


@pytest.fixture(scope="module")
def here(llama, batches):
    """The recorder inside vLLM; a request is aborted, others are preempted."""
    engine = ENGINE | {"num_gpu_blocks_override": NUM_BLOCKS}
    return Recorded(llama, "vllm", batches, engine=engine, aborts={str(ABORTED): LAST_STEP})


@pytest.fixture(scope="module")
def there(llama, batches):
    """The recorder in the embedded engine."""
    return Recorded(llama, "embedded", batches)


@pytest.fixture(scope="module")
def vllm_here():
    """Import vLLM in this process, and put the environment back."""
    before = dict(os.environ)
    try:
        os.environ |= QUIET
        prepare_environment()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from specround.integrations.vllm import runner, scheduler  # noqa: F401
        yield
    finally:
        os.environ.clear()
        os.environ |= before


@pytest.mark.vllm
def test_requests_are_told_their_tokens(here):
    """A request starts with its prompt, leaves and resumes with exactly what it had, and ends with all it generated."""
    known, slots, left, resumed = {}, {}, {}, 0
    started = []
    for call in here.told("request_started", "propose", "request_finished"):
        if call["hook"] == "propose":
            for request, tokens in call["committed"].items():
                known[request] += tokens
            continue
        request = call["request"]
        if call["hook"] == "request_started":
            assert request not in slots
            assert call["req_idx"] not in slots.values()
            slots[request] = call["req_idx"]
            if request in known:
                resumed += 1
                assert call["tokens"] == left.pop(request) == known[request]
            else:
                started.append(request)
                known[request] = list(call["tokens"])
        else:
            assert call["req_idx"] == slots.pop(request)
            assert call["tokens"] == known[request]
            left[request] = call["tokens"]
    assert resumed == here.made["preemptions"] > 0
    asks = [ask["prompt"] for batch in here.batches for ask in batch]
    generated = [tokens for batch in here.made["tokens"] for tokens in batch]
    assert [len(tokens) for tokens in generated if len(tokens) < 60] == [len(generated[ABORTED]), 5]
    texts = [prompt + tokens for prompt, tokens in zip(asks, generated, strict=True)]
    assert [known[request] for request in started] == texts
    assert set(map(tuple, left.values())) == set(map(tuple, texts[:5]))  # nobody was told about the last one yet


@pytest.mark.vllm
def test_counts_of_rounds(here):
    """Counts of the device hook and of the host hook agree, and add up to what was generated."""
    stats, steps = here.told("round_finished"), here.told("observe_step")
    assert sum(sum(call["num_committed"]) for call in stats) == here.num_generated
    assert sum(sum(call["num_committed"]) for call in steps) == here.num_generated
    stats_of_samples = [call for call in stats if any(call["num_committed"])]  # a step of prompts is not observed
    cut = 0
    for known, seen in zip(stats_of_samples, steps, strict=True):
        assert known["num_committed"] == seen["num_committed"]
        for scheduled, verified in zip(known["num_candidates"], seen["num_candidates"], strict=True):
            assert scheduled >= verified
            cut += scheduled > verified
    assert cut <= 6, "rows are left over only where a request ends"
    for call in stats:
        assert all(map(int.__ge__, call["num_candidates"], call["num_committed"]))
        assert call["seconds"] > 0
    numbers = [call["step"] for call in stats]
    assert numbers == sorted(set(numbers))
    for call in steps:
        assert call["num_requests"] == len(call["num_candidates"])
        assert call["num_rows"] >= sum(call["num_candidates"])
        assert call["graph_shape"] is None


@pytest.mark.vllm
def test_what_policies_see(here):
    """Blocks of 32 tokens, the pool without its null block, free blocks as requests take them, steps from 0."""
    budgets = here.told("candidate_budget")
    for view in budgets + here.told("admit_limit"):
        assert view["block_size"] == 32
        assert view["num_total_blocks"] == NUM_BLOCKS - 1
        assert 0 <= view["num_free_blocks"] <= view["num_total_blocks"] - view["num_running"]
        assert view["num_spec_blocks_held"] == 0
        assert (view["num_speculative_tokens"], view["max_candidates"]) == (NUM_DRAFTS, NUM_DRAFTS + 1)
    assert [view["step"] for view in budgets] == list(range(len(budgets)))
    first = budgets[0]  # four short prompts take a block each
    assert (first["num_running"], first["num_waiting"], first["num_free_blocks"]) == (4, 1, NUM_BLOCKS - 1 - 4)
    assert min(view["num_free_blocks"] for view in budgets) == 0  # or nobody would have been preempted
    asked = here.told("admit_limit")[0]
    assert (asked["num_running"], asked["num_waiting"], asked["num_free_blocks"]) == (0, 5, NUM_BLOCKS - 1)


@pytest.mark.vllm
def test_hidden_states_are_the_embedded_engines(here, there):
    """The hidden state of every committed row, in the order of the path, is the same in both hosts."""
    shared = here.rows.keys() & there.rows.keys()
    for prompt, tokens in zip(here.batches[0], here.made["tokens"][0], strict=True):
        text = tuple(prompt["prompt"] + tokens)
        assert {text[:end] for end in range(1, len(text))} <= shared
    found = [torch.tensor([recorded.rows[known] for known in sorted(shared)]) for recorded in (here, there)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)
    assert found[0].std(0).min() > 0.1, "rows could not be told apart"
    assert here.made["moves"] > 10, "every path was a chain"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("adapted", "message"),
    [
        ({"max_branching": 2}, r"AdaptingConfig\.adapt_resources='tree': must be at most the declared 'chain'"),
        ({"hidden_states": "last"}, r"AdaptingConfig\.adapt_resources='last': must be hidden_states='none', as decl"),
    ],
    ids=["kind", "hidden_states"],
)
def test_resources_are_not_raised(llama, adapted, message):
    """A speculator that answers with more than it declared is refused at start-up, with its name and both values."""
    config = {"method": "adapting", "num_speculative_tokens": 4, "max_branching": 1, "adapted": adapted}
    with pytest.raises(AssertionError, match=message):
        llama.run("adapting", config)


@pytest.mark.vllm
def test_the_other_runner_is_refused(llama):
    """An environment that selects vLLM's first runner is refused with the name of the variable."""
    with pytest.raises(AssertionError, match=r"VLLM_USE_V2_MODEL_RUNNER=0: must be 1"):
        llama.run("first-runner", llama.config("ngram"), environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_here")
def test_layers_tell_the_kernel_what_they_are():
    """Scale, window, sinks and soft cap of a layer reach its kernel, with the rows and without the padding."""
    from specround.integrations.vllm.attention import RoundAttention, RoundMetadata

    given = {}

    def kernel(query, key_cache, value_cache, rows, **named):
        given.update(named, shapes=(query.shape, key_cache.shape, value_cache.shape), rows=rows)
        return query * 2

    sinks, rows = torch.arange(4.0), object()
    full = RoundAttention(4, 8, 0.5, 2, sliding_window=5, logits_soft_cap=3.0, sinks=sinks)
    bare = RoundAttention(4, 8, 0.25, 2, logits_soft_cap=0)
    query, cache = torch.arange(5.0 * 32).view(5, 32), torch.zeros(2, 16, 2, 16).transpose(1, 2)
    shapes = ((3, 4, 8), (32, 2, 8), (32, 2, 8))
    for layer, expected in (
        (full, {"scale": 0.5, "window": 5, "sinks": sinks, "softcap": 3.0}),
        (bare, {"scale": 0.25, "window": None, "sinks": None, "softcap": None}),
    ):
        layer.kernel, output = kernel, torch.full_like(query, -1)
        given.clear()
        layer.forward(None, query, query, query, cache, RoundMetadata(rows, torch.zeros(3), 3), output)
        assert given["sinks"] is expected["sinks"]
        assert given == expected | {"shapes": shapes, "rows": rows}
        assert torch.equal(output[:3], query[:3] * 2)
        assert (output[3:] == -1).all()


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_here")
def test_what_a_request_kept_is_told_once(monkeypatch):
    """The scheduler hands over what requests kept with the next step alone, and the runner uses it for that step."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from specround.integrations.vllm.runner import RoundRunner
    from specround.integrations.vllm.scheduler import RoundScheduler

    for name in ("_free_request", "_preempt_request", "_update_after_schedule"):
        monkeypatch.setattr(Scheduler, name, lambda self, given: None)
    monkeypatch.setattr(GPUModelRunner, "_remove_request", lambda self, name: True)
    monkeypatch.setattr(GPUModelRunner, "finish_requests", lambda self, step: [*map(self._remove_request, step.gone)])
    scheduler, runner, told = RoundScheduler.__new__(RoundScheduler), RoundRunner.__new__(RoundRunner), []
    scheduler._kept, scheduler._policies, scheduler._chosen_logprobs = {}, SimpleNamespace(), set()
    runner.steps = SimpleNamespace(forget=lambda *given: told.append(given))
    for gone in ("ab", "c", ""):
        for place, name in enumerate(gone):
            leave = scheduler._preempt_request if place else scheduler._free_request
            leave(SimpleNamespace(request_id=name, num_tokens=10 + ord(name), num_prompt_tokens=5))
        step = SimpleNamespace(num_scheduled_tokens={}, gone=gone)
        scheduler._update_after_schedule(step)
        assert step.specround_kept == {name: 10 + ord(name) for name in gone}
        runner.finish_requests(step)
        runner._remove_request("a")  # as a request is that comes again before it left
    assert told == [("a", 107), ("b", 108), ("a", None), ("c", 109), ("a", None), ("a", None)]


def test_a_request_that_left_has_no_drafts():
    """The hook gets what was kept, once, and neither drafts nor tokens of the request stay behind."""
    told, config = [], SpecResources(max_candidates=4)
    speculator = BaseSpeculator()
    speculator.request_finished = lambda *given: told.append(given)
    spec_round = SpecRound(speculator, config, ReferencePagedCommit(), 16, check_values=True)
    table = RequestTable(max_num_seqs=2, max_model_len=64, num_drafts=3, device=torch.device("cpu"))
    steps = RoundSteps(spec_round, table, wants_hidden=False, host_drafting=False)
    for name, place in (("a", 1), ("b", 0)):
        steps.start(name, place, [1, 2, 3, 4, 5], 40)
        steps.num_drafts[name] = 2
    steps.forget("a", 4)
    steps.forget("a", 4)
    assert told == [("a", 1, (1, 2, 3, 4))]
    assert steps.num_drafts == {"b": 2}
    assert table.request_ids == {"b": 0}


def test_a_thinking_budget_verifies_no_drafts():
    """A request whose thinking is counted token by token verifies nothing but its root, even with a budget of 0."""
    assert sampling_limit(SimpleNamespace(thinking_token_budget=None)).kind == "mask"
    for budget in (0, 8):
        limit = sampling_limit(SimpleNamespace(thinking_token_budget=budget))
        assert limit.kind == "none"
        assert "thinking_token_budget" in limit.reason
