"""From vLLM's batch to the round's, without vLLM: which rows are plan rows, what a request may verify."""

from __future__ import annotations

import torch

from specround import SpecResources
from specround.integrations.vllm.batch import StepRequests, make_batch, plan_logits
from specround.integrations.vllm.requests import RequestTable
from specround.integrations.vllm.step import RoundSteps
from specround.kernels.reference import ReferencePagedCommit
from specround.round import SpecRound
from specround.speculators.ngram import NgramConfig

VOCAB = 16


def make_table(plain: set[str] = frozenset()) -> RequestTable:
    table = RequestTable(max_num_seqs=4, max_model_len=64, num_drafts=3, device=torch.device("cpu"))
    for place, name in enumerate("abc"):
        table.start(name, place, list(range(1, 11)), 40)
    table.plain |= plain
    return table


def requests() -> StepRequests:
    """A chunk that does not end its prefill, one that does, and a request that verifies three drafts."""
    return StepRequests(
        request_ids=("a", "b", "c"),
        req_idx=(0, 1, 2),
        num_rows=(4, 6, 4),
        num_drafts=(0, 0, 3),
        num_computed=(2, 4, 9),
        prefill_len=(10, 10, 5),
    )


def test_plan_rows():
    """No plan row in the middle of a prefill, one at its end, root and drafts in decode."""
    assert requests().num_plan_rows == (0, 1, 4)
    assert plan_logits(requests()) == [1, 2, 3, 4, 5]


def test_batch():
    """Roots, counts and bounds are those of the contract."""
    batch = make_batch(requests(), make_table(), torch.zeros(3, 4), 16, budget=4, max_candidates=4)
    assert batch.max_rows.tolist() == [0, 1, 4]
    assert batch.root_position.tolist() == [6, 9, 9]
    assert batch.root_token_ids.tolist() == [-1, 10, 10]
    assert batch.root_row.tolist() == [4, 9, 10]
    assert batch.shape.kv_bounds == (6, 10, 13)
    assert batch.block_tables.dtype == torch.int64


def test_rows_stop_at_the_end_of_a_request():
    """A request that may generate two more tokens verifies one draft."""
    table = make_table()
    table.limits[2] = 12
    batch = make_batch(requests(), table, torch.zeros(3, 4), 16, budget=4, max_candidates=4)
    assert batch.max_rows.tolist() == [0, 1, 2]


def test_plain_requests_verify_their_root():
    """A request whose rows would need a history of their own has one candidate whatever was scheduled."""
    batch = make_batch(requests(), make_table({"c"}), torch.zeros(3, 4), 16, budget=4, max_candidates=4)
    assert batch.max_rows.tolist() == [0, 1, 1]


def test_a_step():
    """One step of a host drafter: planned, accepted, committed, and drafts for each request counted."""
    config = NgramConfig(num_speculative_tokens=3)
    resources = config.declare_resources()
    assert resources == SpecResources(max_candidates=4, drafting="host")
    speculator = config.create(resources, None, torch.device("cpu"))
    spec_round = SpecRound(speculator, resources, ReferencePagedCommit(), VOCAB, check_values=True)
    table = RequestTable(max_num_seqs=2, max_model_len=64, num_drafts=3, device=torch.device("cpu"))
    steps = RoundSteps(spec_round, table, wants_hidden=False, host_drafting=True)
    steps.start("a", 1, [1, 2, 3, 1, 2], 40)
    first = StepRequests(
        request_ids=("a",), req_idx=(1,), num_rows=(5,), num_drafts=(0,), num_computed=(0,), prefill_len=(5,)
    )
    steps.plan(first, torch.ones(1, 4), 16)
    tokens, counts = steps.accept(*[torch.nn.functional.one_hot(torch.tensor([3]), VOCAB).float()] * 2)
    assert (tokens.tolist(), counts.tolist()) == ([[3]], [1])
    steps.commit([], torch.zeros(5, 8))
    steps.observe()
    assert steps.propose(3).tolist() == [[1, 2, 3]]
    assert steps.num_drafts == {"a": 3}
    assert table.token_history[1, :6].tolist() == [1, 2, 3, 1, 2, 3]
    second = StepRequests(
        request_ids=("a",), req_idx=(1,), num_rows=(4,), num_drafts=(3,), num_computed=(5,), prefill_len=(5,)
    )
    step = steps.plan(second, torch.ones(1, 4), 16)
    assert step.layout.input_ids.tolist() == [3, 1, 2, 3]
    assert step.layout.positions.tolist() == [5, 6, 7, 8]
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 9, 0]), VOCAB).float()
    tokens, counts = steps.accept(logits, logits)
    assert (tokens.tolist(), counts.tolist()) == ([[1, 2, 9, 0]], [3])
    steps.forget("a", 6)
    assert table.request_ids == {}
