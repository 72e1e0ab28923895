"""The lookahead example: its window and pool against slow ones, its text against plain decoding, its probes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import lookahead
import pytest
import torch
from lookahead import LookaheadConfig, LookaheadSpeculator, WindowShape
from plain_reference import Ask, PlainReference, Tally, check_at_rest

from specround import LLM, AcceptResult, RequestOutput, SpeculatorConfig, VerifyPlan
from specround.contract import (
    CapabilityError,
    ConfigError,
    LayerDescriptor,
    PlanError,
    ProposeView,
    SpecLimit,
    SpeculatorError,
    VerifyOutput,
)
from specround.kernels.reference import ReferenceAttention
from specround.kernels.tree import committable_rows, mask_bits, tree_tables
from specround.round import PlanLayout, RoundBatch, SpecRound, layout

MAX_MODEL_LEN, VOCAB = 160, 24
SIZES = ((5, 4, 3), (1, 2, 1), (3, 2, 4), (2, 5, 2), (15, 3, 15))


def settings(window: int = 5, ngram: int = 4, guesses: int = 3, **values: Any) -> dict[str, Any]:
    sizes = {"window_size": window, "ngram_size": ngram, "guess_set_size": guesses}
    drafts = (window + guesses) * (ngram - 1) - 1
    return {"method": "lookahead", "num_speculative_tokens": drafts} | sizes | values


def workload(columns: int = 24) -> list[Ask]:
    """Prompts of one token to nearly the limit, random or a repeated motif, greedy and sampled.

    A plan never has more rows than tokens are left, so the outputs are longer than the columns of a whole plan.
    """
    rng, asks = random.Random(3), []
    for place, length in enumerate((1, 2, 5, 9, 14, 30, 41, 140)):
        motif = [rng.randrange(3, VOCAB) for _ in range(length if place % 2 else min(length, 4))]
        prompt = tuple(motif[i % len(motif)] for i in range(length))
        wanted = min(columns + 24, MAX_MODEL_LEN - length)
        asks += [Ask(prompt, wanted, temperature, seed=place * 2**60) for temperature in (0.0, 0.8)]
    return asks


def generate(llm: LLM, asks: list[Ask]) -> list[RequestOutput]:
    return llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])


def check(target: PlainReference, asks: list[Ask], outputs: list[RequestOutput]) -> None:
    """Every token is the plain one."""
    tally = Tally()
    for ask, output in zip(asks, outputs, strict=True):
        target.compare(ask, output.outputs[0].token_ids, tally)
    tally.check()


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.accepted for output in outputs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window_size": 0}, "window_size=0: must be an integer >= 1"),
        ({"ngram_size": 1}, "ngram_size=1: must be an integer >= 2"),
        ({"guess_set_size": 2.0}, "guess_set_size=2.0: must be an integer >= 1"),
        ({"window_size": 30}, r"window_size=30: must be small enough .* <= 64 rows"),
        ({"num_speculative_tokens": 22}, r"num_speculative_tokens=22: must be at least .* = 23"),
        ({"pool_size": 13}, r"pool_size=13: must be an integer >= 2 \* window_size \+ ngram_size = 14"),
        ({"pool_from_text": 1}, "pool_from_text=1: must be True or False"),
    ],
)
def test_settings_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    """Sizes that are out of range or do not fit together are refused with what would be allowed."""
    with pytest.raises(ConfigError, match=message):
        LookaheadConfig(**({"num_speculative_tokens": 23} | values))


def test_resources() -> None:
    """A mask of (W + G)(N - 1) rows, also where more drafts were allowed; 64 rows are the most."""
    resources = LookaheadConfig(num_speculative_tokens=40).declare_resources()
    assert (resources.kind, resources.max_candidates, resources.drafting) == ("mask", 24, "device")
    widest = LookaheadConfig(num_speculative_tokens=63, window_size=10, ngram_size=5, guess_set_size=6)
    assert widest.declare_resources().max_candidates == 64


def test_the_window_sees_what_it_sees_in_the_paper() -> None:
    """W = 5, N = 4: level 0 is a chain from the root; later levels continue their own column, one position each."""
    shape = WindowShape(LookaheadConfig(num_speculative_tokens=23))

    def seen(level: int, place: int) -> list[tuple[int, int]]:
        where = {shape.column(level, place): (level, place) for level in range(3) for place in range(5)}
        return [where[column] for column in sorted(shape.sees[shape.column(level, place)])]

    assert seen(0, 2) == [(0, 0), (0, 1), (0, 2)]
    assert seen(1, 0) == [(0, 0), (1, 0)]
    assert seen(1, 4) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 4)]
    assert seen(2, 4) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 4)]
    assert [[shape.positions[shape.column(level, place)] for place in range(5)] for level in range(3)] == [
        [0, 1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [2, 3, 4, 5, 6],
    ]
    assert shape.sees[:4] == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]
    assert shape.sees[4:7] == [{0, 4}, {0, 4, 5}, {0, 4, 5, 6}]
    assert shape.positions[1:10] == [1, 2, 3] * 3


@pytest.mark.parametrize("sizes", SIZES)
def test_the_window_is_probes_as_a_mask_and_rows_as_a_tree(sizes: tuple[int, int, int]) -> None:
    """By the contract's own rule guesses are committable in both plans, the window only in the tree."""
    config = LookaheadConfig(**{k: v for k, v in settings(*sizes).items() if k != "method"})
    shape = WindowShape(config)
    mask = torch.zeros(1, shape.columns, shape.columns, dtype=torch.bool)
    for column, seen in enumerate(shape.sees):
        mask[0, column, sorted(seen)] = True
    positions = torch.tensor([shape.positions])
    for parents, window in ((shape.parents, False), (shape.comb, True)):
        rows = committable_rows(tree_tables(torch.tensor([parents])), mask_bits(mask), positions)[0].tolist()
        assert rows == [True] * shape.first + [window] * (shape.columns - shape.first)


@dataclass
class Slow:
    """Window and pool of one request in plain Python."""

    window: list[list[int]]
    limit: int
    pool: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, ngram: tuple[int, ...]) -> None:
        if ngram in self.pool:
            self.pool.remove(ngram)
        self.pool.append(ngram)
        del self.pool[: -self.limit]

    def add_text(self, tokens: list[int], first: int, size: int) -> None:
        """N-grams that end at index `first` or later."""
        for end in range(max(first + 1, size), len(tokens) + 1):
            self.add(tuple(tokens[end - size : end]))

    def plan(self, root: int, guesses: int) -> list[int]:
        fitting = [ngram[1:] for ngram in reversed(self.pool) if ngram[0] == root][:guesses]
        fitting += [(0,) * len(self.window)] * (guesses - len(fitting))
        flat = [token for level in self.window for token in level]
        return [root, *[token for ngram in fitting for token in ngram], *flat[1:]]

    def follow(self, root: int, predicted: list[int], count: int) -> None:
        self.window[0][0] = root
        levels = [*self.window, predicted]
        for column in range(len(predicted)):
            self.add(tuple(level[column] for level in levels))
        start = (count - 1) % len(predicted)
        self.window = [level[start:] + level[:start] for level in levels[1:]]


class Watched(LookaheadSpeculator):
    """Compares every plan with the slow window and pool, and every prediction with the module's."""

    target: PlainReference
    rounds = 0

    def request_started(self, request_id, req_idx, token_ids):
        super().request_started(request_id, req_idx, token_ids)
        self.tokens, self.slow = list(token_ids), Slow(self.window[req_idx].tolist(), self.config.pool_size)
        self.rows: list[int] | None = None
        if self.config.pool_from_text:
            self.slow.add_text(self.tokens, 0, self.config.ngram_size)

    def plan(self, view):
        plan = super().plan(view)
        if int(view.max_rows[0]) > 0:
            wanted = self.slow.plan(self.tokens[-1], self.config.guess_set_size)
            assert plan.token_ids[0].tolist() == wanted[: plan.num_columns]
            type(self).rounds += plan.num_columns == self.shape.columns
        return plan

    def accept(self, plan: VerifyPlan, output: VerifyOutput) -> AcceptResult | None:
        answer, self.rows = super().accept(plan, output), None
        if plan.num_columns == self.shape.columns and int(plan.num_candidates[0]) == self.shape.columns:
            self.rows = output.logits.argmax(-1).tolist()
            for column in range(self.shape.first, self.shape.columns) if self.rounds % 3 == 1 else ():
                seen = sorted(self.shape.sees[column])
                path = [*self.tokens[:-1], *[int(plan.token_ids[0, c]) for c in seen]]
                with torch.no_grad():
                    wanted = self.target.module(input_ids=torch.tensor([path])).logits[0, -1]
                error = (output.raw_logits[column] - wanted).abs().max() / wanted.abs().max()
                assert error < 1e-4, (column, float(error))
        return answer

    def propose(self, view: ProposeView) -> None:
        super().propose(view)
        count = int(view.result.num_committed[0])
        if count == 0:
            return
        if self.rows is not None:
            newest = [self.shape.column(self.shape.levels - 1, place) for place in range(self.shape.width)]
            self.slow.follow(self.tokens[-1], [self.rows[column] for column in newest], count)
        first = len(self.tokens)
        self.tokens += view.result.token_ids[0, :count].tolist()
        if self.config.pool_from_text:
            self.slow.add_text(self.tokens, first, self.config.ngram_size)


@pytest.mark.parametrize(("pool", "pool_from_text"), [(256, True), (16, True), (256, False)])
@pytest.mark.parametrize("sizes", SIZES[:4])
def test_plans_are_those_of_a_slow_window_and_pool(
    sizes: tuple[int, int, int],
    pool: int,
    pool_from_text: bool,
    target: PlainReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each plan holds the pool's newest n-grams and the window; a probe's logits are the module's on what it sees."""
    Watched.target, Watched.rounds = target, 0
    monkeypatch.setattr(lookahead, "LookaheadSpeculator", Watched)
    long = tuple(random.Random(5).choices(range(3, 12), k=60))
    asks = [Ask((5, 6, 7, 8, 5, 6, 7, 8, 5), 40), Ask(long, 40, 0.8, seed=5), Ask((9,), 32)]
    config = settings(*sizes, pool_from_text=pool_from_text, pool_size=pool)
    llm = LLM(target.path, config, max_model_len=MAX_MODEL_LEN, max_num_seqs=1, max_num_batched_tokens=24)
    check(target, asks, generate(llm, asks))
    assert Watched.rounds > 8


def test_a_full_pool_forgets_the_oldest() -> None:
    """Only valid n-grams are written, over the oldest; one that comes again is kept once and becomes the newest."""
    config = LookaheadConfig(num_speculative_tokens=1, window_size=1, ngram_size=2, guess_set_size=1, pool_size=4)
    speculator = LookaheadSpeculator(config, 2, torch.device("cpu"))
    slow = Slow([[0]], limit=4)
    rng = random.Random(0)
    for step in range(200):
        ngrams = [(rng.randrange(3), rng.randrange(3)) for _ in range(3)]
        valid = [rng.random() < 0.4 for _ in ngrams]
        speculator._remember(
            torch.tensor([1]), torch.tensor([ngrams]), torch.tensor([valid]), torch.tensor([[step + 1]])
        )
        for ngram, written in zip(ngrams, valid, strict=True):
            if written:
                slow.add(ngram)
        order = [place for place in speculator.age[1].argsort().tolist() if speculator.age[1, place] >= 0]
        assert [tuple(speculator.pool[1, place].tolist()) for place in order] == slow.pool
    assert bool((speculator.age[0] == -1).all()), "another request's pool"


@dataclass
class Paths:
    """What every round of an engine accepted, and whether the window's rows were committable."""

    paths: list[list[int]] = field(default_factory=list)
    window_rows: int = 0
    committable: int = 0


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    found, original = Paths(), SpecRound.accept

    def accept(self: SpecRound, laid_out: PlanLayout, output: VerifyOutput, batch: RoundBatch) -> AcceptResult:
        result = original(self, laid_out, output, batch)
        if isinstance(self.speculator, LookaheadSpeculator):
            found.paths += [[c for c in path if c >= 0] for path in result.path.tolist()]
            if laid_out.committable is not None:
                window = laid_out.committable[:, self.speculator.shape.first :]
                found.window_rows += window.numel()
                found.committable += int(window.sum())
        return result

    monkeypatch.setattr(SpecRound, "accept", accept)
    return found


ENGINES = [
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"async_scheduling": False, "block_size": 1, "max_num_batched_tokens": 32, "max_num_seqs": 3},
    {"async_scheduling": True, "block_size": 4, "num_blocks": 40, "max_num_seqs": 12},
    {"async_scheduling": False, "block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 96},
]


@pytest.mark.parametrize(
    ("engine", "sizes"), [(e, s) for i, e in enumerate(ENGINES) for j, s in enumerate(SIZES) if (i + j) % 2 == 0]
)
def test_text_is_plain_and_probes_are_never_kept(
    engine: dict[str, Any], sizes: tuple[int, int, int], target: PlainReference, paths: Paths
) -> None:
    """Greedy and seeded, alone and batched, in small pools, in time and late: plain tokens, paths of guesses only."""
    columns = (sizes[0] + sizes[2]) * (sizes[1] - 1)
    asks = workload(columns)
    llm = LLM(target.path, settings(*sizes), max_model_len=MAX_MODEL_LEN, **engine)
    assert llm.engine.plan_kind == "mask"
    outputs = generate(llm, asks)
    check(target, asks, outputs)
    check_at_rest(llm)
    assert accepted(outputs) > 0
    if engine.get("num_blocks") and engine.get("max_num_seqs"):
        assert llm.engine.core.scheduler.num_preemptions > 0
    first = 1 + sizes[2] * (sizes[1] - 1)
    assert (paths.window_rows > 0) == (first < columns)
    assert paths.committable == 0
    assert max(column for path in paths.paths for column in path) < first
    assert max(map(len, paths.paths)) > 1


@pytest.mark.parametrize("schedule", [[[1, 2, 23], [3, 64, 0]], [[2, 64, 7]]], ids=["none", "guesses"])
def test_a_smaller_budget_cuts_the_window_first(
    schedule: list[list[int]], target: PlainReference, paths: Paths
) -> None:
    """Rounds without drafts, or with too few for the window, leave text, pool and window sound."""
    asks = workload()
    config = settings(num_speculative_tokens_per_batch_size=schedule)
    outputs = generate(LLM(target.path, config, max_model_len=MAX_MODEL_LEN, max_num_seqs=4), asks)
    check(target, asks, outputs)
    assert accepted(outputs) > 0


def test_the_window_alone_finds_what_is_accepted(target: PlainReference) -> None:
    """Without n-grams of the text, every accepted token comes from a probe's prediction."""
    asks = workload()
    llm = LLM(target.path, settings(pool_from_text=False), max_model_len=MAX_MODEL_LEN)
    outputs = generate(llm, asks)
    check(target, asks, outputs)
    assert accepted(outputs) > 0


class Limited(ReferenceAttention):
    """Attention that verifies at most one kind."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        return SpecLimit(self.kind, f"this kernel verifies {self.kind}s")


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_it_adapts_to_targets_without_masks(
    kind: str, target: PlainReference, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tree the whole window is verified, and its rows may be kept; as a chain one guess, with rows for no more."""
    kernel = Limited(kind)
    monkeypatch.setattr(SpeculatorConfig, "spec_kernel_providers", (lambda: {"attention:full/verify": kernel},))
    asks = workload()
    llm = LLM(target.path, settings(), max_model_len=MAX_MODEL_LEN)
    assert llm.engine.plan_kind == kind
    outputs = generate(llm, asks)
    check(target, asks, outputs)
    assert accepted(outputs) > 0
    assert paths.committable == paths.window_rows
    assert (max(column for path in paths.paths for column in path) > 9) == (kind == "tree")
    if kind == "chain":
        assert max(map(len, paths.paths)) <= 4


def test_a_target_that_chains_needs_the_text(target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain has no room for a window: without the text nothing would fill the pool, so it is refused with reasons."""
    kernel = Limited("chain")
    monkeypatch.setattr(SpeculatorConfig, "spec_kernel_providers", (lambda: {"attention:full/verify": kernel},))
    with pytest.raises(CapabilityError, match="without pool_from_text needs a target that verifies trees: this kernel"):
        LLM(target.path, settings(pool_from_text=False))


def test_a_path_through_a_probe_is_refused(target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: acceptance that keeps a row of the window is a `PlanError` that calls it a probe."""

    class Greedy(LookaheadSpeculator):
        def accept(self, plan: VerifyPlan, output: VerifyOutput) -> AcceptResult | None:
            if int(plan.num_candidates[0]) < self.shape.columns:
                return super().accept(plan, output)
            path = torch.full_like(plan.token_ids, -1, dtype=torch.int32)
            tokens = torch.full_like(plan.token_ids, -1)
            path[0, :3] = torch.tensor([0, 1, self.shape.first])
            tokens[0, :3] = torch.tensor([int(plan.token_ids[0, 1]), int(plan.token_ids[0, self.shape.first]), 3])
            return AcceptResult(path, torch.tensor([3], dtype=torch.int32), tokens)

    monkeypatch.setattr(lookahead, "LookaheadSpeculator", Greedy)
    with pytest.raises(SpeculatorError, match="path=10: must be a committable row, not a probe") as caught:
        generate(LLM(target.path, settings(), max_model_len=MAX_MODEL_LEN), [Ask((5, 6, 7), 40)])
    assert isinstance(caught.value.__cause__.__cause__, PlanError)


def test_text_changes_where_probes_count_as_rows(target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other control: with probes marked as committable, built-in acceptance keeps some and the text is wrong."""
    monkeypatch.setattr(layout, "committable_rows", lambda tables, visible, positions: torch.ones_like(visible) == 1)
    asks = [ask for ask in workload() if ask.temperature == 0]
    outputs = generate(LLM(target.path, settings(), max_model_len=MAX_MODEL_LEN), asks)
    wrong = [tuple(o.outputs[0].token_ids) != a for o, a in zip(outputs, target.answers(asks), strict=True)]
    assert sum(wrong) > 2
