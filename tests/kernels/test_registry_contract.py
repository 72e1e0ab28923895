"""What the contract says of the kernel registry, one statement per test, beside what `test_kernel_registry` covers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import tree_speculator  # noqa: F401  (registers "recall")

from specround import LLM, SamplingParams, SpecResources, SpeculatorConfig
from specround.contract import (
    KERNEL_KEYS,
    KernelError,
    LayerDescriptor,
    SpecCapabilities,
    SpecKernel,
    SpecLimit,
    VerifyPlan,
)
from specround.engine import build
from specround.kernels import registry as registry_module
from specround.kernels.reference import ReferenceAttention, ReferenceKernels, ReferencePagedCommit
from specround.kernels.registry import KernelRegistry
from specround.kernels.tree_attention.rows import AttentionRows
from specround.round import SpecRound, lower_resources

PAGED, FULL, SLIDING = "layout:paged_token/commit", "attention:full/verify", "attention:sliding/verify"
FEATURES = {
    "alibi": "ALiBi",
    "chunked_local": "chunked local attention",
    "kv_sharing": "shares another layer's KV",
    "kv_scales": "separate scales",
}
PROMPT = {"prompt_token_ids": [3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5]}
TREE_CONFIG = {"method": "recall", "num_speculative_tokens": 6, "branches": 2}


class Kernel:
    """Supports what a function says of a layer; counts the layers it was asked about and its bindings."""

    def __init__(self, supports: Callable[[LayerDescriptor], SpecLimit] = lambda _: SpecLimit("mask")) -> None:
        self.answer, self.asked, self.bound = supports, 0, list[SpecResources]()

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        self.asked += 1
        return self.answer(layer)

    def bind(self, resources: SpecResources) -> None:
        self.bound.append(resources)


def layer(name: str = "layer", **fields: Any) -> LayerDescriptor:
    return LayerDescriptor(name=name, **({"verify_key": FULL} | fields))


def generate(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    return llm.generate(PROMPT, params)[0].outputs[0].token_ids


def provide(monkeypatch: pytest.MonkeyPatch, kernels: Mapping[str, SpecKernel]) -> None:
    monkeypatch.setattr(SpeculatorConfig, "spec_kernel_providers", (lambda: kernels,))


def test_the_built_in_kernels_come_from_the_reference_provider() -> None:
    """Without providers the registry holds what `ReferenceKernels` supplies, and nothing under any other key."""
    registry, built_in = KernelRegistry(), ReferenceKernels()
    assert {key for key in KERNEL_KEYS if registry.get(key) is not None} == set(built_in)
    assert all(type(registry.get(key)) is type(kernel) for key, kernel in built_in.items())


@pytest.mark.parametrize("key", KERNEL_KEYS)
def test_a_provider_may_supply_any_subset(key: str) -> None:
    """One key alone, whichever it is, is a subset: that kernel is used, every other key stays as it was."""
    own, built_in = Kernel(), ReferenceKernels()
    registry = KernelRegistry([lambda: {key: own}])
    assert registry.get(key) is own
    for other in set(KERNEL_KEYS) - {key}:
        assert type(registry.get(other)) is type(built_in.get(other))


def test_factories_run_once_in_order_and_the_last_wins_each_key() -> None:
    """Providers overlay in the order they are named; who comes later wins a key, whatever the other keys say."""
    calls: list[str] = []
    kernels = {name: Kernel() for name in "abc"}

    def factory(name: str, *keys: str) -> Callable[[], dict[str, Kernel]]:
        def provider() -> dict[str, Kernel]:
            calls.append(name)
            return dict.fromkeys(keys, kernels[name])

        return provider

    registry = KernelRegistry([factory("a", FULL, SLIDING, PAGED), factory("b", SLIDING, FULL), factory("c", FULL)])
    registry.capabilities([layer(), layer(verify_key=SLIDING)])
    registry.bind(SpecResources(max_candidates=4, max_branching=2))
    assert calls == ["a", "b", "c"]
    assert [registry.get(key) for key in (FULL, SLIDING, PAGED)] == [kernels["c"], kernels["b"], kernels["a"]]


def test_each_overridden_key_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An override is logged once per key and provider, however many share a kernel and however often it is asked."""

    def mine() -> dict[str, Kernel]:
        return dict.fromkeys((FULL, SLIDING), Kernel())

    with caplog.at_level(logging.INFO, logger="specround"):
        registry = KernelRegistry([mine])
        for _ in range(3):
            registry.capabilities([layer(str(n)) for n in range(8)])
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[0] for line in lines] == [f"kernel {key}" for key in (FULL, SLIDING)]
    assert all("mine overrides ReferenceAttention" in line for line in lines)


def test_an_unknown_key_stops_the_engine_at_start_up(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key is an error before anything runs, and it lists the known keys."""
    provide(monkeypatch, {"attention:flash/verify": Kernel()})
    with pytest.raises(KernelError, match="unknown key 'attention:flash/verify': known keys are") as caught:
        LLM(tiny_target, TREE_CONFIG)
    assert all(key in str(caught.value) for key in KERNEL_KEYS)


def test_supports_answers_for_each_layer() -> None:
    """One kernel may verify masks on one layer and trees on the next: it is asked for each of them."""
    tree = SpecLimit("tree", "windows hide no rows here")
    kernel = Kernel(lambda asked: tree if asked.window else SpecLimit("mask"))
    registry = KernelRegistry([lambda: dict.fromkeys((FULL, SLIDING), kernel)])
    layers = [layer("0"), layer("1", verify_key=SLIDING, window=4), layer("2")]
    assert [registry.limit(each) for each in layers] == [SpecLimit("mask"), tree, SpecLimit("mask")]
    assert kernel.asked == 3
    assert registry.capabilities(layers) == SpecCapabilities("tree", (tree.reason,))


def test_every_kernel_that_a_layer_needs_must_support_it() -> None:
    """KV with separate scales chains while verify or commit declines it, and is lifted by kernels that take it."""
    scaled = layer(features=frozenset({"kv_scales"}))
    takes_scales = Kernel()
    for keys, kind in (((), "chain"), ((FULL,), "chain"), ((PAGED,), "chain"), ((FULL, PAGED), "mask")):
        registry = KernelRegistry([lambda keys=keys: dict.fromkeys(keys, takes_scales)])
        limit = registry.limit(scaled)
        assert (limit.kind, bool(limit.reason)) == (kind, kind == "chain")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_chains_its_layer_with_its_own_reason(feature: str) -> None:
    """ALiBi, chunked local attention, KV sharing and separately scaled KV chain a layer of any attention kind."""
    for key in (FULL, SLIDING, "attention:mla/verify"):
        limit = KernelRegistry().limit(layer(verify_key=key, features=frozenset({feature})))
        assert limit.kind == "chain"
        assert [name for name, words in FEATURES.items() if words in limit.reason] == [feature]


@pytest.mark.parametrize("declared", [{"custom_mask": True}, {"max_branching": 2}, {}], ids=["mask", "tree", "chain"])
def test_one_line_per_reason_that_lowers(declared: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Twelve layers with four features are four lines, each with its reason; for a chain there are none."""
    layers = [layer(f"{name}.{n}", features=frozenset({name})) for name in FEATURES for n in range(3)]
    capabilities = KernelRegistry().capabilities([layer("plain"), *layers])
    config = SpeculatorConfig(num_speculative_tokens=3)
    with caplog.at_level(logging.WARNING, logger="specround"):
        effective = lower_resources(config, SpecResources(max_candidates=4, **declared), capabilities)
    assert effective == SpecResources(max_candidates=4)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (len(FEATURES) if declared else 0)
    assert all(sum(words in line for line in lines) == bool(declared) for words in FEATURES.values())


def test_a_missing_commit_kernel_chains_and_is_never_called(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a kernel that the layers need, a tree speculator chains: one line names the key, text stays."""

    class WithoutCommit(ReferenceKernels):
        def __init__(self) -> None:
            super().__init__()
            del self[PAGED]

    plain = generate(LLM(tiny_target))
    monkeypatch.setattr(registry_module, "ReferenceKernels", WithoutCommit)
    with caplog.at_level(logging.WARNING, logger="specround"):
        llm = LLM(tiny_target, TREE_CONFIG)
    assert llm.engine.plan_kind == "chain"
    assert [r.getMessage().split(": ", 1)[1] for r in caplog.records] == [f"no kernel is registered for {PAGED}"]
    assert llm.engine.core.runner.round._commit_kernel is None, "a call would fail"
    assert generate(llm) == plain


def test_the_registry_is_built_once_and_bound_with_effective_resources(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine builds one registry and binds it once, with what is left after lowering, not what was declared."""
    built: list[KernelRegistry] = []

    class Watched(KernelRegistry):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            built.append(self)

    class ChainAttention(ReferenceAttention):
        bound: list[SpecResources] = []  # noqa: RUF012

        def supports(self, layer: LayerDescriptor) -> SpecLimit:
            return SpecLimit("chain", "this kernel knows chains only")

        def bind(self, resources: SpecResources) -> None:
            self.bound.append(resources)

    class Commit(ReferencePagedCommit):
        def bind(self, resources: SpecResources) -> None:
            raise AssertionError("paged-token commit was bound for chains")

    monkeypatch.setattr(build, "KernelRegistry", Watched)
    provide(monkeypatch, {FULL: ChainAttention(), PAGED: Commit()})
    generate(LLM(tiny_target, TREE_CONFIG))
    assert len(built) == 1
    assert ChainAttention.bound == [SpecResources(max_candidates=7)]


def test_a_verify_kernel_gets_each_row_s_parent(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider's kernel finds the plan's tree in its rows: the packed row of each parent, -1 at a request's first."""
    plans: list[VerifyPlan] = []
    seen: list[AttentionRows] = []
    original = SpecRound.lay_out

    def lay_out(self: SpecRound, plan: VerifyPlan, batch: Any) -> Any:
        plans.append(plan)
        return original(self, plan, batch)

    class Watching(ReferenceAttention):
        def __call__(self, query: Any, key_cache: Any, value_cache: Any, rows: AttentionRows, **values: Any) -> Any:
            if not seen or seen[-1] is not rows:
                seen.append(rows)
            return super().__call__(query, key_cache, value_cache, rows, **values)

    monkeypatch.setattr(SpecRound, "lay_out", lay_out)
    provide(monkeypatch, {FULL: Watching()})
    prompts = [PROMPT, {"prompt_token_ids": [7, 8, 7, 8, 7]}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    LLM(tiny_target, TREE_CONFIG, async_scheduling=False).generate(prompts, params)
    assert len(plans) == len(seen) > 3
    checked = 0
    for plan, rows in zip(plans, seen, strict=True):
        assert rows.parents is not None, "a tree plan"
        if rows.num_rows != plan.token_ids.numel():
            continue  # a step with prompt rows, or with requests that may use fewer columns
        parents = rows.parents.view(plan.num_requests, plan.num_columns)
        start = torch.arange(plan.num_requests)[:, None] * plan.num_columns
        assert plan.parents is not None
        assert torch.equal(parents[:, 1:], (start + plan.parents)[:, 1:])
        assert bool((parents[:, 0] == -1).all())
        checked += int(plan.num_columns > 2)
    assert checked > 2
