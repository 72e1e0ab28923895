"""What every view must hold, worked out again from the requests' tokens and the Hugging Face module alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace

import torch
from plain_reference import Ask, PlainReference
from witness import StepRecord

TOLERANCE = 1e-4
"""Largest error of logits and hidden states, relative to the largest element."""


@dataclass
class Live:
    """A request in its slot.

    Attributes:
        ask: The request.
        whole: Its prompt and more of its continuation than it asks for.
        prefill_end: Tokens it started with.
        computed: Tokens whose KV is committed.
    """

    ask: Ask
    whole: tuple[int, ...]
    prefill_end: int
    computed: int = 0

    @property
    def limit(self) -> int:
        return len(self.ask.prompt) + self.ask.max_tokens


@dataclass
class Place:
    """One request of a step: its rows, and where its root stands (None for a prefill that does not end)."""

    live: Live
    slot: int
    num_rows: int
    prefix: int
    plan_rows: int
    root: int | None

    @property
    def sampled(self) -> bool:
        return self.live.ask.temperature > 0


class ViewOracle:
    """Checks records in order.

    Args:
        reference: The target.
        asks: Requests by id.
        drafts: K.
    """

    def __init__(self, reference: PlainReference, asks: dict[str, Ask], drafts: int) -> None:
        self.reference, self.asks, self.drafts = reference, asks, drafts
        self.live: dict[int, Live] = {}
        self.bound = 1
        self.seen: Counter[str] = Counter()
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._hidden: dict[tuple[int, ...], torch.Tensor] = {}

    def check(self, record: StepRecord) -> None:
        """Check one step's views and move on."""
        assert record.proposal is not None
        assert record.verified is not None
        assert record.output is not None
        for _, slot, _ in record.finished:
            del self.live[slot]
        for name, slot, tokens in record.started:
            assert slot not in self.live
            whole = (*self.asks[name].prompt, *self._answer(self.asks[name]))
            assert tokens == whole[: len(tokens)]
            self.live[slot] = Live(self.asks[name], whole, len(tokens))
        places = [
            self._place(*pair) for pair in zip(record.plan.req_idx.tolist(), record.proposal.num_rows, strict=True)
        ]
        self._count_phases(places)
        self._check_plan_view(record.plan, places)
        self._check_output(record.output, record.verified, places)
        self._check_result(record.proposal.result, record.verified, places)
        self._check_observation(record, places)
        committed = record.proposal.result.num_committed.tolist()
        for place, count in zip(places, committed, strict=True):
            place.live.computed += place.prefix + count
        assert record.proposal.max_rows.tolist() == record.plan.max_rows.tolist()
        self._check_proposal(record.proposal, places, committed)

    def _answer(self, ask: Ask) -> tuple[int, ...]:
        longer = Ask(ask.prompt, ask.max_tokens + self.drafts + 2, ask.temperature, ask.seed)
        return self.reference.answers([longer])[0]

    def _place(self, slot: int, num_rows: int) -> Place:
        live = self.live[slot]
        if live.computed >= live.prefill_end:
            assert 1 <= num_rows <= self.bound
            return Place(live, slot, num_rows, 0, num_rows, live.computed)
        end = live.computed + num_rows
        assert num_rows >= 1
        assert end <= live.prefill_end
        if end < live.prefill_end:
            return Place(live, slot, num_rows, num_rows, 0, None)
        return Place(live, slot, num_rows, num_rows - 1, 1, end - 1)

    def _count_phases(self, places: list[Place]) -> None:
        phases = set()
        for place in places:
            decode = place.live.computed >= place.live.prefill_end
            phases.add("decode" if decode else "chunk" if place.root is None else "ending prefill")
        self.seen.update(phases)
        for phase in phases - {"decode"}:
            self.seen[f"{phase} beside decode"] += "decode" in phases
        self.seen["mixed sampling"] += len({place.sampled for place in places if place.root is not None}) == 2
        self.seen["greedy only"] += not any(place.sampled for place in places)

    def _check_slots(self, view: SimpleNamespace, places: list[Place]) -> None:
        """What all views say about the requests themselves."""
        assert view.req_idx.tolist() == [place.slot for place in places]
        for place in places:
            ask = place.live.ask
            assert float(view.sampling.temperature[place.slot]) == float(torch.tensor(ask.temperature))
            assert int(view.seeds[place.slot]) % 2**64 == ask.seed % 2**64

    def _check_plan_view(self, view: SimpleNamespace, places: list[Place]) -> None:
        self._check_slots(view, places)
        assert view.budget == self.bound
        assert view.num_columns == max(1, *(place.plan_rows for place in places))
        assert view.draft_token_ids.shape[1] == self.drafts
        assert view.num_computed_tokens.tolist() == [place.live.computed for place in places]
        roots = [-1 if place.root is None else place.live.whole[place.root] for place in places]
        assert view.root_token_ids.tolist() == roots
        rows = [
            0 if place.root is None else min(place.plan_rows, max(1, place.live.limit - place.root - 1))
            for place in places
        ]
        assert view.max_rows.tolist() == rows
        for place in places:
            known = place.live.prefill_end if place.root is None else place.root + 1
            assert tuple(view.token_history[place.slot, :known].tolist()) == place.live.whole[:known]

    def _check_output(self, output: SimpleNamespace, plan: SimpleNamespace, places: list[Place]) -> None:
        self._check_slots(output, places)
        starts = list(accumulate((place.plan_rows for place in places), initial=0))
        assert output.row_start.tolist() == starts
        assert output.logits.shape == output.raw_logits.shape == (starts[-1], self.reference.module.config.vocab_size)
        for r, place in enumerate(places):
            if place.root is None:
                continue
            assert int(output.root_row[r]) == starts[r]
            assert int(output.num_computed_tokens[r]) == place.root
            for column in range(int(plan.num_candidates[r])):
                row = starts[r] + column
                history = place.live.whole[: place.root + 1] + branch(plan, r, column)
                self._close(output.raw_logits[row], self._run(history)[0])
                temperature = place.live.ask.temperature
                expected = output.raw_logits[row] / temperature if temperature > 0 else output.raw_logits[row]
                torch.testing.assert_close(output.logits[row], expected, rtol=1e-6, atol=0)
                self.seen["logits rows"] += 1

    def _check_result(self, result: SimpleNamespace, plan: SimpleNamespace, places: list[Place]) -> None:
        for r, place in enumerate(places):
            count = int(result.num_committed[r])
            path, tokens = result.path[r].tolist(), result.token_ids[r].tolist()
            assert path[count:] == tokens[count:] == [-1] * (len(path) - count)
            if place.root is None:
                assert count == int(plan.num_candidates[r]) == 0
                continue
            assert path[0] == 0
            assert tuple(tokens[:count]) == place.live.whole[place.root + 1 : place.root + 1 + count]
            assert branch(plan, r, path[count - 1]) == tuple(tokens[: count - 1]), "the path is one branch of the tree"
            self.seen["moved rows"] += sum(column != i for i, column in enumerate(path[:count]))
            self.seen["accepted"] += count - 1

    def _check_observation(self, record: StepRecord, places: list[Place]) -> None:
        observation, result = record.observation, record.proposal.result
        if all(place.root is None for place in places):
            assert observation is None
            return
        assert observation.num_requests == len(places)
        assert observation.num_rows == sum(place.num_rows for place in places)
        assert observation.graph_shape is None, "no graph on a CPU"
        assert observation.num_candidates.tolist() == record.verified.num_candidates.tolist()
        assert observation.num_committed.tolist() == result.num_committed.tolist()
        self.seen["observations"] += 1

    def _check_proposal(self, view: SimpleNamespace, places: list[Place], committed: list[int]) -> None:
        """After the step: `computed` has moved on."""
        self._check_slots(view, places)
        self.bound = view.budget
        assert view.budget == self.drafts + 1
        assert view.any_sampled == any(place.sampled for place in places if place.root is not None)
        assert view.num_computed_tokens.tolist() == [place.live.computed for place in places]
        starts = list(accumulate((place.num_rows for place in places), initial=0))
        assert view.row_start.tolist() == starts
        assert view.root_row.tolist() == [start + place.prefix for start, place in zip(starts, places, strict=False)]
        assert view.row_req_idx.tolist() == [place.slot for place in places for _ in range(place.num_rows)]
        assert view.draft_token_ids[view.req_idx].eq(-1).all(), "old drafts are gone"
        assert view.input_ids.shape == view.positions.shape == (starts[-1],)
        for r, (place, count) in enumerate(zip(places, committed, strict=True)):
            whole, computed = place.live.whole, place.live.computed
            assert int(view.root_token_ids[r]) == (whole[computed] if count else -1)
            known = computed + 1 if count else place.live.prefill_end
            assert tuple(view.token_history[place.slot, :known].tolist()) == whole[:known]
            kept = place.prefix + count
            first = computed - kept
            rows = slice(starts[r], starts[r] + kept)
            assert tuple(view.input_ids[rows].tolist()) == whole[first:computed]
            assert view.positions[rows].tolist() == list(range(first, computed))
            assert view.positions[starts[r] + kept : starts[r + 1]].eq(-1).all()
            if view.hidden_states is not None:
                self._close(view.hidden_states[rows], self._run(whole[:computed])[1][first:computed])
                self.seen["hidden rows"] += kept

    @torch.no_grad()
    def _run(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits after the last token and hidden states of all of them."""
        if tokens not in self._logits:
            self._hidden[tokens] = self.reference.module.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            self._logits[tokens] = self.reference.module.lm_head(self._hidden[tokens][-1])
        return self._logits[tokens], self._hidden[tokens]

    def _close(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


def branch(plan: SimpleNamespace, r: int, column: int) -> tuple[int, ...]:
    """Draft tokens from below the root down to a column."""
    tokens: list[int] = []
    while column > 0:
        tokens.append(int(plan.token_ids[r, column]))
        column = column - 1 if plan.parents is None else int(plan.parents[r, column])
    return tuple(reversed(tokens))
