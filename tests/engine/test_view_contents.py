"""Every view of every step, worked out again from the requests' tokens; what policies and statistics are told."""

from __future__ import annotations

import pytest
import torch
from plain_reference import Ask, PlainReference, Tally, check_at_rest
from view_oracle import ViewOracle
from witness import StepRecord, witness

from specround import LLM

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
WIDTH = pytest.mark.parametrize("width", [1, 2], ids=["chain", "tree"])
DRAFTS, VOCAB = 6, 24
LENGTHS = ((3, 12), (1, 14), (17, 9), (2, 3), (9, 16), (5, 1), (30, 8), (4, 11), (40, 9), (6, 30))
ASKS = {
    f"r{n}": Ask(
        tuple((7 * n + 5 * i + i * i) % VOCAB for i in range(length)), tokens, (0.0, 0.8, 1.7)[n % 3], n * (2**61 + 1)
    )
    for n, (length, tokens) in enumerate(LENGTHS)
}


def answers(target: PlainReference) -> list[tuple[int, ...]]:
    """Prompts with more of their continuation than anybody asks for."""
    longer = [Ask(a.prompt, a.max_tokens + DRAFTS + 2, a.temperature, a.seed) for a in ASKS.values()]
    return [(*ask.prompt, *tokens) for ask, tokens in zip(longer, target.answers(longer), strict=True)]


def run(target: PlainReference, late: bool, **values: object) -> list[StepRecord]:
    log: list[StepRecord] = []
    llm = LLM(
        target.path,
        witness(answers(target), DRAFTS, vocab_size=VOCAB, log=log, **values),
        async_scheduling=late,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        block_size=4,
        max_model_len=64,
    )
    asks = list(ASKS.values())
    outputs = llm.generate([a.as_prompt for a in asks], [a.params for a in asks], request_ids=list(ASKS))
    tally = Tally()
    for ask, output in zip(asks, outputs, strict=True):
        target.compare(ask, output.outputs[0].token_ids, tally)
    tally.check()
    check_at_rest(llm)
    return [record for record in log if record.proposal is not None]


@LATE
@WIDTH
def test_every_view_of_every_step(width: int, late: bool, target: PlainReference) -> None:
    """Each field of each view equals what follows from the tokens; logits and hidden states are Hugging Face's."""
    oracle = ViewOracle(target, ASKS, DRAFTS)
    for record in run(target, late, width=width):
        assert record.plan_kind == ("chain" if width == 1 else "tree")
        oracle.check(record)
    expected = {"chunk beside decode", "ending prefill beside decode", "mixed sampling", "greedy only", "accepted"}
    expected |= {"logits rows", "hidden rows", "observations"} | ({"moved rows"} if width == 2 else set())
    assert {name for name in expected if oracle.seen[name] > 0} == expected, oracle.seen


def test_undeclared_hidden_states_are_not_given(target: PlainReference) -> None:
    """Without a declaration `hidden_states` is None, and nothing else changes."""
    oracle = ViewOracle(target, ASKS, DRAFTS)
    for record in run(target, late=False, width=2, hidden_states="none"):
        assert record.proposal.hidden_states is None
        oracle.check(record)


@LATE
def test_host_step(late: bool, target: PlainReference) -> None:
    """A host drafter gets ids, slots, committed tokens and room of each request; a device drafter gets None."""
    records = run(target, late, width=2, drafting="host", hidden_states="none")
    names: dict[int, str] = {}
    for record in records:
        for _, slot, _ in record.finished:
            del names[slot]
        names |= {slot: name for name, slot, _ in record.started}
        view, host = record.proposal, record.proposal.host
        assert list(host.req_idx) == view.req_idx.tolist()
        assert list(host.request_ids) == [names[slot] for slot in host.req_idx]
        kept = [row[row >= 0].tolist() for row in view.result.token_ids]
        assert [list(tokens) for tokens in host.committed] == kept
        for r, name in enumerate(host.request_ids):
            left = len(ASKS[name].prompt) + ASKS[name].max_tokens - int(view.num_computed_tokens[r]) - 1
            if kept[r] and not late:
                assert min(DRAFTS, max(0, left - 1)) <= host.max_drafts[r] <= DRAFTS
    assert all(record.proposal.host is None for record in run(target, late=False, width=1))


def test_buffers_keep_their_addresses(target: PlainReference) -> None:
    """History, drafts, seeds and temperatures are the same tensors in every view of every step."""
    seen: set[tuple[int, ...]] = set()

    def note(view: object) -> None:
        tensors = (view.token_history, view.draft_token_ids, view.seeds, view.sampling.temperature)
        seen.add(tuple(tensor.data_ptr() for tensor in tensors))

    llm = LLM(target.path, witness(answers(target), 3, vocab_size=VOCAB), max_num_seqs=2)
    speculator = llm.engine.core.runner.speculator
    plan, propose = type(speculator).plan, type(speculator).propose
    speculator.plan = lambda view: (note(view), plan(speculator, view))[1]
    speculator.propose = lambda view: (note(view), propose(speculator, view))[1]
    asks = list(ASKS.values())
    llm.generate([a.as_prompt for a in asks], [a.params for a in asks])
    assert len(seen) == 1
    assert torch.equal(llm.engine.core.runner.state.draft_token_ids, torch.full((3, 3), -1))
