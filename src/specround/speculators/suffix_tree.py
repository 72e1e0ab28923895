"""`suffix_tree`: trees of likely continuations, counted in the request's own text and in finished requests.

Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", arXiv 2411.04975.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specround.contract import (
    MAX_TREE_COLUMNS,
    BaseSpeculator,
    ConfigError,
    SpecResources,
    SpeculatorConfig,
    VerifyPlan,
    register_speculator,
)
from specround.speculators.suffix_index import Occurrence, Position, RequestCache, SuffixIndex
from specround.speculators.tree_drafts import TreeDrafts

if TYPE_CHECKING:
    from specround.contract import DraftHost, PlanView, ProposeView


@register_speculator("suffix_tree")
@dataclass(frozen=True, kw_only=True)
class SuffixTreeConfig(SpeculatorConfig):
    """Suffix decoding: no draft model and no training; good where text repeats, within a request or across requests.

    Attributes:
        max_branching: Most children of a draft tree's row, >= 1; 1 drafts chains.
        suffix_decoding_max_tree_depth: Longest string counted, in tokens, >= 2. Contexts are matched up to one less.
        suffix_decoding_max_cached_requests: Finished requests whose text is kept for the others, the least recently
            used one leaves first; 0 = drafts come from the request's own text only. What is generated does not depend
            on it, but its speed does: users who must not learn of each other's text should not share a cache.
        suffix_decoding_max_spec_factor: Most drafts per token of matched context, > 0.
        suffix_decoding_min_token_prob: Drafts whose estimated probability is lower are left out, 0 to 1.

    Raises:
        ConfigError: A field is out of range, or a tree has more than 63 drafts.

    Example:
        >>> SuffixTreeConfig(num_speculative_tokens=16).declare_resources().kind
        'tree'
    """

    max_branching: int = 4
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        lowest = {
            "max_branching": 1,
            "suffix_decoding_max_tree_depth": 2,
            "suffix_decoding_max_cached_requests": 0,
        }
        for field, least in lowest.items():
            if type(getattr(self, field)) is not int or getattr(self, field) < least:
                raise ConfigError(field, getattr(self, field), f"an integer >= {least}")
        factor, probability = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if type(factor) not in (int, float) or not factor > 0:
            raise ConfigError("suffix_decoding_max_spec_factor", factor, "a number > 0")
        if type(probability) not in (int, float) or not 0 <= probability <= 1:
            raise ConfigError("suffix_decoding_min_token_prob", probability, "a number from 0 to 1")
        if self.max_branching > 1 and self.num_speculative_tokens >= MAX_TREE_COLUMNS:
            allowed = f"at most {MAX_TREE_COLUMNS - 1} for trees (max_branching > 1)"
            raise ConfigError("num_speculative_tokens", self.num_speculative_tokens, allowed)

    def declare_resources(self) -> SpecResources:
        """A tree, or chain, of K drafts that is drafted on the host."""
        candidates = self.num_speculative_tokens + 1
        return SpecResources(max_candidates=candidates, max_branching=self.max_branching, drafting="host")

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> SuffixTreeSpeculator:
        """Build the speculator with buffers for every request slot of the host."""
        return SuffixTreeSpeculator(self, resources, host.max_num_seqs, device)


@dataclass(frozen=True, kw_only=True)
class GrowthLimits:
    """Bounds of every draft tree.

    Attributes:
        max_branching: Most children of a row, the root included; 1 = a chain.
        max_depth: Deepest draft; a child of the root has depth 1.
        min_score: Drafts with a lower score are left out.
        spec_factor: Most drafts per token of matched context; used by `best_tree`.
    """

    max_branching: int
    max_depth: int
    min_score: float = 0.0
    spec_factor: float = 1.0


@dataclass(frozen=True)
class DraftTree:
    """Drafts in the order they were chosen. Draft i stands in column i + 1 of a plan, column 0 is the root.

    Attributes:
        tokens: The drafts.
        parents: Column of each draft's parent, smaller than its own.
        scores: Estimated probability that each draft is accepted: the product of the conditional probabilities on its
            path. Never larger than the previous draft's.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def expected_accepted(self) -> float:
        """Sum of the scores: how many drafts one expects to be accepted."""
        return sum(self.scores)


def grow_tree(index: SuffixIndex, position: Position, limits: GrowthLimits, max_nodes: int) -> DraftTree:
    """Grow a tree of likely continuations, always adding the draft with the best score.

    Equal scores: the draft whose string occurred more recently, then the lower token, then the one found first. Costs
    `O(n b log(n b))` for n drafts and branching b.

    Args:
        index: The index.
        position: The string to continue.
        limits: Shape of the tree.
        max_nodes: Most drafts.

    Example:
        >>> index = SuffixIndex(max_depth=4, max_children=2)
        >>> index.add("r1", [1, 2, 1, 3, 1])
        >>> grow_tree(index, index.match([1]), GrowthLimits(max_branching=2, max_depth=3), max_nodes=3)
        DraftTree(tokens=(3, 1, 2), parents=(0, 1, 0), scores=(0.5, 0.5, 0.5))
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    heap: list[tuple[float, Occurrence, int, int, int, int, Position]] = []
    found = column = depth = 0
    score = 1.0
    while len(tokens) < max_nodes:
        if depth < limits.max_depth:
            followed, ordered = index.continuations(position)
            for count, latest, token, child in ordered[: limits.max_branching]:
                child_score = score * (count / followed)
                if child_score < limits.min_score:
                    break
                heapq.heappush(heap, (-child_score, -latest, token, found, column, depth + 1, child))
                found += 1
        if not heap:
            break
        negative, _, token, _, parent, depth, position = heapq.heappop(heap)
        score = -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        column = len(tokens)
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def best_tree(
    index: SuffixIndex,
    matches: Iterable[tuple[int, Position]],
    limits: GrowthLimits,
    max_nodes: int,
    floor: float = 0.0,
) -> tuple[DraftTree, Position] | None:
    """The tree with the most expected accepted drafts over several lengths of matched context.

    A match of length m may have `spec_factor * m` drafts: a long match is trusted further. Equal trees: the longer
    match. Shorter matches than one that cannot be beaten are not looked at.

    Args:
        index: The index.
        matches: Length and position of each match, longest first.
        limits: Shape of the trees.
        max_nodes: Most drafts, however long the match.
        floor: Trees must expect more than this.

    Returns:
        The tree and the position it was grown from, or None if no tree expects more than `floor`.
    """
    best: tuple[DraftTree, Position] | None = None
    for length, position in matches:
        # A score is at most 1, so a tree expects no more than it has drafts; 1e-6 forgives 0.1 * 30 = 2.9999999999.
        affordable = int(min(max_nodes, limits.spec_factor * length + 1e-6))
        if affordable <= floor:
            break
        tree = grow_tree(index, position, limits, affordable)
        if tree.expected_accepted > floor:
            best, floor = (tree, position), tree.expected_accepted
    return best


class SuffixTreeSpeculator(BaseSpeculator):
    """Drafts trees on the host, keeps them on the device by request slot, and plans them without waiting.

    Args:
        config: Bounds of the index and of the trees.
        resources: Declared resources; they size the buffers.
        max_num_seqs: Request slots. One more slot, which stays empty, is there for padding.
        device: Where the buffers live.
    """

    def __init__(
        self, config: SuffixTreeConfig, resources: SpecResources, max_num_seqs: int, device: torch.device
    ) -> None:
        self._config = config
        self.bind_resources(resources)
        self._indexes: dict[str, SuffixIndex] = {}
        self._trees: dict[str, DraftTree] = {}
        self._cache: RequestCache | None = None
        if config.suffix_decoding_max_cached_requests > 0:
            self._cache = RequestCache(
                config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_tree_depth, config.max_branching
            )
        self._drafts = TreeDrafts(max_num_seqs + 1, resources.max_candidates, device)

    @property
    def cached_requests(self) -> tuple[str, ...]:
        """Finished requests whose text is kept, least recently used first."""
        return () if self._cache is None else self._cache.request_ids

    def draft_scores(self, request_id: str) -> tuple[float, ...]:
        """Estimated probability that each draft waiting to be verified is accepted, in column order (column 1 first).

        Empty for a request without drafts, and for one that is not running.
        """
        tree = self._trees.get(request_id)
        return () if tree is None else tree.scores

    def bind_resources(self, effective: SpecResources) -> None:
        """Draft what the effective resources verify; without branching, the best single path."""
        self._max_candidates = effective.max_candidates
        self._limits = GrowthLimits(
            max_branching=min(effective.max_branching, self._config.max_branching),
            max_depth=effective.depth_limit,
            min_score=self._config.suffix_decoding_min_token_prob,
            spec_factor=self._config.suffix_decoding_max_spec_factor,
        )

    def request_started(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Index the request's tokens and empty its slot. From now on its own index covers what the cache kept of it."""
        if self._cache is not None:
            self._cache.discard(request_id)
        index = SuffixIndex(self._config.suffix_decoding_max_tree_depth, self._config.max_branching)
        index.add(request_id, token_ids)
        self._indexes[request_id] = index
        self._trees.pop(request_id, None)
        self._drafts.clear(req_idx)

    def request_finished(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Forget the request's drafts; its tokens go to the cache, where a preempted request is until it resumes."""
        self._indexes.pop(request_id, None)
        self._trees.pop(request_id, None)
        if self._cache is not None:
            self._cache.add(request_id, token_ids)

    def plan(self, view: PlanView) -> VerifyPlan:
        """The drafts of each request's slot, cut to the step's columns: a prefix of the columns is a tree too."""
        return self._drafts.plan(view, as_chain=self._limits.max_branching == 1)

    def propose(self, view: ProposeView) -> Sequence[int]:
        """Follow the committed tokens and draft for every request of the step."""
        return self._follow(view, min(self._max_candidates, view.budget) - 1)

    def absorb(self, view: ProposeView) -> None:
        """Follow the committed tokens and leave every slot of the step empty."""
        self._follow(view, 0)

    def _follow(self, view: ProposeView, max_drafts: int) -> list[int]:
        step = view.host
        assert step is not None, "a host drafter is given HostStep"
        trees: list[DraftTree] = []
        for request_id, committed, allowed in zip(step.request_ids, step.committed, step.max_drafts, strict=True):
            tree = DraftTree()
            if committed:
                self._indexes[request_id].extend(committed)
                tree = self._draft(self._indexes[request_id], min(max_drafts, allowed))
            self._trees[request_id] = tree
            trees.append(tree)
        device, columns = self._drafts.token_ids.device, self._drafts.token_ids.shape[1]
        slots = torch.tensor(step.req_idx, dtype=torch.int64).to(device, non_blocking=True)
        packed = torch.from_numpy(_pack(trees, columns)).to(device, non_blocking=True)
        self._drafts.write(slots, packed[:, 0], packed[:, 1].to(torch.int32))
        return [len(tree.tokens) for tree in trees]

    def _draft(self, index: SuffixIndex, max_drafts: int) -> DraftTree:
        """The best tree of the request's own text, unless the cache has one that expects more."""
        own = best_tree(index, index.suffix_matches(), self._limits, max_drafts)
        tree = DraftTree() if own is None else own[0]
        if self._cache is not None:
            context = index.tail(index.max_depth - 1)
            matches = self._cache.index.context_matches(context)
            cached = best_tree(self._cache.index, matches, self._limits, max_drafts, floor=tree.expected_accepted)
            if cached is not None:
                tree = cached[0]
                self._cache.touch(cached[1])
        return tree


def _pack(trees: Sequence[DraftTree], columns: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    """Tokens and parents of the trees, `[len(trees), 2, columns]` int64, -1 = unused."""
    packed = np.full((len(trees), 2, columns), -1, dtype=np.int64)
    for row, tree in zip(packed, trees, strict=True):
        used = len(tree.tokens) + 1
        row[0, 1:used], row[1, 1:used] = tree.tokens, tree.parents
    return packed
