"""Speculators for the vLLM tests: their settings are JSON values, as vLLM's configuration wants them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from adversarial import AdversarialConfig
from tree_speculator import RecallConfig, RecallSpeculator

from specround import BaseSpeculator, SpecResources, SpeculatorConfig, register_speculator
from specround.contract import DraftRows
from specround.contract.resources import DraftLayer
from specround.speculators.suffix_tree import SuffixTreeConfig


@register_speculator("adversarial_from_file")
@dataclass(frozen=True, kw_only=True)
class AdversarialFromFile(AdversarialConfig):
    """The adversarial speculator, which is told the plain answers in a file of [prompt, answer] pairs."""

    answers_file: str

    def __post_init__(self):
        super().__post_init__()
        pairs = json.loads(Path(self.answers_file).read_text())
        object.__setattr__(self, "answers", {tuple(prompt): answer for prompt, answer in pairs})


def triton_kernels():
    """The Triton kernels; imported late, as only vLLM's process asks for the interpreter before Triton is imported."""
    from specround.kernels.gpu import triton_kernels

    return triton_kernels()


@register_speculator("adversarial_on_triton")
@dataclass(frozen=True, kw_only=True)
class AdversarialOnTriton(AdversarialFromFile):
    """The adversarial speculator on the Triton kernels."""

    spec_kernel_providers = (triton_kernels,)


@register_speculator("suffix_with_policies")
@dataclass(frozen=True, kw_only=True)
class SuffixWithPolicies(SuffixTreeConfig):
    """`suffix_tree` with policies that are easy to see: at most `most_running` requests, budgets in turn."""

    most_running: int = 2
    budgets: tuple[int, ...] = (1, 3, 5)

    def admit_limit(self, view):
        assert view.num_waiting >= 1
        assert view.num_running <= self.most_running
        return self.most_running

    def candidate_budget(self, view):
        assert 1 <= view.num_running <= self.most_running
        assert 0 <= view.num_free_blocks <= view.num_total_blocks
        return self.budgets[view.step % len(self.budgets)]


LAYERS = (
    DraftLayer(name="full", num_kv_heads=2, head_dim=32),
    DraftLayer(name="near", num_kv_heads=1, head_dim=32, window=3),
)


@register_speculator("module")
@dataclass(frozen=True, kw_only=True)
class ModuleConfig(SpeculatorConfig):
    """A drafter with attention layers of its own, over the target's embeddings.

    Attributes:
        embedding: Name of the target's embeddings.
        log_file: Gets a line for each round: committed tokens so far, drafts.
    """

    embedding: str = "model.embed_tokens.weight"
    log_file: str

    def declare_resources(self):
        return SpecResources(max_candidates=self.num_speculative_tokens + 1, draft_layers=LAYERS)

    def create(self, resources, host, device):
        return ModuleSpeculator(self, host)


class ModuleSpeculator(BaseSpeculator):
    """Absorbs committed rows into its layers and drafts a chain, each token from what the last row attends to."""

    def __init__(self, config, host):
        self.config, self.host = config, host
        self.embedding = host.load([config.embedding])[config.embedding].detach()[: host.vocab_size]
        random = torch.Generator().manual_seed(3)
        sizes = {layer.name: (4 * 32, layer.num_kv_heads * 32, layer.num_kv_heads * 32) for layer in LAYERS}
        self.weights = {
            name: [torch.randn(size, self.embedding.shape[1], generator=random).to(self.embedding) for size in made]
            for name, made in sizes.items()
        }
        self.head = torch.randn(self.embedding.shape[0], 2 * 4 * 32, generator=random).to(self.embedding)

    def forward(self, rows, token_ids):
        self.host.begin(rows)
        turned = self.embedding[token_ids.clamp(min=0)] * (1 + torch.cos(rows.positions[:, None] * 0.7))
        outputs = []
        for name, weights in self.weights.items():
            query, key, value = ((turned @ weight.T).unflatten(1, (-1, 32)) for weight in weights)
            outputs.append(self.host.attend(name, query, key, value).flatten(1))
        return (torch.cat(outputs, 1) @ self.head.T).argmax(-1)

    def absorb(self, view):
        rows = DraftRows(
            req_idx=view.row_req_idx,
            positions=view.positions.clamp(min=0),
            slots=view.positions,
            parents=torch.full_like(view.positions, -1),
            num_rows=view.num_rows,
        )
        self.forward(rows, view.input_ids)

    def propose(self, view):
        self.absorb(view)
        live, tokens, place = view.root_token_ids >= 0, view.root_token_ids, view.num_computed_tokens.to(torch.int64)
        for column in range(view.budget - 1):
            rows = DraftRows(
                req_idx=view.req_idx,
                positions=place + column,
                slots=torch.where(live, place + column, -1),
                parents=torch.full_like(place, -1),
                num_rows=(1,) * len(place),
            )
            tokens = self.forward(rows, tokens)
            view.draft_token_ids[view.req_idx, column] = torch.where(live, tokens, -1)
        with Path(self.config.log_file).open("a") as log:
            for i, slot in enumerate(view.req_idx.tolist()):
                if live[i]:
                    known = view.token_history[slot, : int(place[i]) + 1].tolist()
                    drafts = view.draft_token_ids[slot, : view.budget - 1].tolist()
                    log.write(json.dumps([known, drafts]) + "\n")


@register_speculator("layered")
@dataclass(frozen=True, kw_only=True)
class LayeredConfig(SuffixTreeConfig):
    """`suffix_tree` that asks for the hidden states of single layers."""

    def declare_resources(self):
        return replace(super().declare_resources(), hidden_states=(0, 1))


@register_speculator("failing")
@dataclass(frozen=True, kw_only=True)
class FailingConfig(SuffixTreeConfig):
    """`suffix_tree` whose plan fails in the third round."""

    def create(self, resources, host, device):
        speculator = super().create(resources, host, device)
        plan, calls = speculator.plan, []

        def failing_plan(view):
            calls.append(view)
            if len(calls) == 3:
                raise ZeroDivisionError("the third round")
            return plan(view)

        speculator.plan = failing_plan
        return speculator


@register_speculator("adapting")
@dataclass(frozen=True, kw_only=True)
class AdaptingConfig(SuffixTreeConfig):
    """`suffix_tree` that answers the target's capabilities with other resources than it declared."""

    adapted: dict[str, Any]

    def adapt_resources(self, resources, capabilities):
        return replace(super().adapt_resources(resources, capabilities), **self.adapted)


@register_speculator("recorder")
@dataclass(frozen=True, kw_only=True)
class RecorderConfig(RecallConfig):
    """`recall`, told the committed tokens and the last hidden states, that writes down what its hooks are told.

    Attributes:
        log_file: Gets a JSON line for each call, in order, of the policies here and of the speculator's hooks.
    """

    log_file: str

    def declare_resources(self):
        return replace(super().declare_resources(), hidden_states="last", drafting="host")

    def create(self, resources, host, device):
        return RecordingSpeculator(self.note)

    def note(self, hook, **told):
        with Path(self.log_file).open("a") as log:
            log.write(json.dumps({"hook": hook} | told) + "\n")

    def admit_limit(self, view):
        self.note("admit_limit", **asdict(view))

    def candidate_budget(self, view):
        self.note("candidate_budget", **asdict(view))
        return super().candidate_budget(view)

    def round_finished(self, stats):
        self.note("round_finished", **asdict(stats))


class RecordingSpeculator(RecallSpeculator):
    """Notes requests that come and go, counts of each step, and a few numbers of each committed row's hidden state."""

    def __init__(self, note):
        self.note = note

    def request_started(self, request_id, req_idx, token_ids):
        self.note("request_started", request=request_id, req_idx=req_idx, tokens=list(token_ids))

    def request_finished(self, request_id, req_idx, token_ids):
        self.note("request_finished", request=request_id, req_idx=req_idx, tokens=list(token_ids))

    def observe_step(self, observation):
        told = {name: getattr(observation, name) for name in ("num_requests", "num_rows", "graph_shape")}
        counts = {name: getattr(observation, name).tolist() for name in ("num_candidates", "num_committed")}
        self.note("observe_step", **told, **counts)

    def propose(self, view):
        rows = zip(view.row_req_idx.tolist(), view.positions.tolist(), view.hidden_states[:, :4].tolist(), strict=True)
        known = {slot: view.token_history[slot].tolist() for slot in view.req_idx.tolist()}
        seen = [[known[slot][: place + 1], numbers] for slot, place, numbers in rows if place >= 0]
        committed = dict(zip(view.host.request_ids, view.host.committed, strict=True))
        self.note("propose", committed=committed, rows=seen)
        return view.host.max_drafts
