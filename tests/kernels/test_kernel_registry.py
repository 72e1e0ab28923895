"""The kernel registry: keys, overlays, what a layer verifies with the kernels there are, and binding."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attention_cases import Setting, build, oracle, tree

from specround.contract import KERNEL_KEYS, KernelError, LayerDescriptor, SpecLimit, SpecResources
from specround.kernels.registry import KernelRegistry
from specround.kernels.tree_attention.rows import lay_out_rows

CHAIN = SpecResources(max_candidates=4)
TREE = SpecResources(max_candidates=4, max_branching=2)
MASK = SpecResources(max_candidates=4, custom_mask=True)
PAGED, FULL = "layout:paged_token/commit", "attention:full/verify"
GDN, STATE = "mamba:gdn@replay/verify", "layout:mamba_state@replay/commit"


@dataclass(eq=False)
class Kernel:
    """A kernel that answers as told and records what is asked of it."""

    answer: SpecLimit = field(default_factory=lambda: SpecLimit("mask"))
    asked: list[str] = field(default_factory=list)
    bound: list[SpecResources] = field(default_factory=list)

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        self.asked.append(layer.name)
        return self.answer

    def bind(self, resources: SpecResources) -> None:
        self.bound.append(resources)


def attention(**fields: object) -> LayerDescriptor:
    return LayerDescriptor(name="layer 0", **({"verify_key": FULL} | fields))


def recurrent() -> LayerDescriptor:
    return LayerDescriptor(name="layer 1", verify_key=GDN, commit_key=STATE)


def without(registry: KernelRegistry, *keys: str) -> KernelRegistry:
    """A registry that lacks some built-in kernels."""
    for key in keys:
        del registry._kernels[key]
    return registry


def test_every_key_has_a_built_in_kernel() -> None:
    """Each key of the contract is filled, and recurrent kernels verify trees, not masks, and say why."""
    registry = KernelRegistry()
    assert all(registry.get(key) is not None for key in KERNEL_KEYS)
    limit = registry.limit(recurrent())
    assert limit == SpecLimit("tree", "a recurrent state folds every ancestor in and cannot hide one")


def test_a_layer_that_a_kernel_declines_keeps_the_built_in_one() -> None:
    """A declining kernel is not called for that layer, whose prompts and chains still need one."""
    declining = Kernel(SpecLimit("none", "too wide"))
    registry = KernelRegistry([lambda: {GDN: declining}])
    assert registry.get(GDN) is declining
    assert registry.get(GDN, recurrent()) is not declining
    assert registry.limit(recurrent()) == SpecLimit("chain", "too wide; " + KernelRegistry().limit(recurrent()).reason)


def test_the_keys_are_those_of_the_contract() -> None:
    """The set of keys is public: renaming or dropping one breaks providers."""
    assert set(KERNEL_KEYS) == {
        "attention:full/verify",
        "attention:sliding/verify",
        "attention:mla/verify",
        "mamba:gdn@slots/verify",
        "mamba:gdn@replay/verify",
        "mamba:kda@slots/verify",
        "mamba:kda@replay/verify",
        "mamba:mamba2@slots/verify",
        "mamba:mamba2@replay/verify",
        "conv:short@slots/verify",
        "conv:short@replay/verify",
        "layout:paged_token/commit",
        "layout:mamba_state@slots/commit",
        "layout:mamba_state@replay/commit",
    }
    assert len(KERNEL_KEYS) == 14


def test_an_unknown_key_is_an_error_that_lists_the_known_ones() -> None:
    """The error names the provider, the key, and every key there is."""

    def typo() -> dict[str, Kernel]:
        return {"attention:full/verfy": Kernel()}

    with pytest.raises(KernelError, match="typo supplies unknown key 'attention:full/verfy'") as caught:
        KernelRegistry([typo])
    assert all(key in str(caught.value) for key in KERNEL_KEYS)


@pytest.mark.parametrize("kernel", [None, "triton", object(), Kernel, print])
def test_what_is_not_a_kernel_is_refused(kernel: object) -> None:
    """Values without supports() and bind(), and a class where its instance is meant, are refused by key."""
    with pytest.raises(KernelError, match=f"for '{FULL}': must be an object with supports"):
        KernelRegistry([lambda: {FULL: kernel}])


def test_a_provider_that_returns_no_mapping_is_refused() -> None:
    """A factory that forgets to return says so instead of failing inside the registry."""
    with pytest.raises(KernelError, match="returned None: must be a mapping of kernels by key"):
        KernelRegistry([lambda: None])


def test_later_providers_win_and_each_override_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Providers overlay in order, any subset of keys; a line per override names key, provider and loser."""
    first, second, new = Kernel(), Kernel(), Kernel()

    def one() -> dict[str, Kernel]:
        return {FULL: first, GDN: new}

    def two() -> dict[str, Kernel]:
        return {FULL: second}

    with caplog.at_level(logging.INFO, logger="specround"):
        registry = KernelRegistry([one, two])
        registry.limit(attention())
        registry.bind(MASK)
    assert registry.get(FULL) is second
    assert registry.get(GDN) is new
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert messages[0].startswith(f"kernel {FULL}:")
    assert messages[0].endswith("one overrides ReferenceAttention")
    assert messages[1].endswith("one overrides ReferenceDeltaRule")
    assert messages[2].endswith("two overrides Kernel")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="specround"):
        assert KernelRegistry([lambda: {}]).get(FULL) is not None
    assert caplog.records == []


@pytest.mark.parametrize(
    "layer",
    [
        attention(),
        attention(verify_key="attention:sliding/verify", window=8),
        attention(verify_key="attention:mla/verify"),
        attention(has_sinks=True),
        attention(softcap=30.0),
    ],
)
def test_attention_layers_verify_masks(layer: LayerDescriptor) -> None:
    """Full, sliding and expanded MLA attention, sinks and soft caps verify masks with the built-in kernels."""
    assert KernelRegistry().limit(layer) == SpecLimit("mask")


@pytest.mark.parametrize(
    ("feature", "word"),
    [
        ("alibi", "ALiBi"),
        ("chunked_local", "chunked local"),
        ("kv_sharing", "shares"),
        ("kv_scales", "separate"),
        ("rswa", "'rswa' is unknown"),
    ],
)
def test_features_measured_by_slot_chain_with_a_reason(feature: str, word: str) -> None:
    """Features that the built-in kernels cannot place in a tree, or do not know, chain a layer and say why, once."""
    limit = KernelRegistry().limit(attention(features=frozenset({feature})))
    assert limit.kind == "chain"
    assert limit.reason.count(word) == 1


def test_a_missing_kernel_chains_and_names_its_key() -> None:
    """Without verify or commit kernel a recurrent layer chains, one reason per missing key; nothing stands in."""
    registry = without(KernelRegistry(), GDN, STATE)
    limit = registry.limit(recurrent())
    assert limit.kind == "chain"
    assert f"no kernel is registered for {GDN}" in limit.reason
    assert f"no kernel is registered for {STATE}" in limit.reason
    assert registry.get(GDN) is None
    verify = Kernel()
    half = without(KernelRegistry([lambda: {GDN: verify}]), STATE)
    assert half.limit(recurrent()) == SpecLimit("chain", f"no kernel is registered for {STATE}")


@pytest.mark.parametrize("declining", [GDN, STATE])
def test_a_declining_kernel_chains_with_its_reason(declining: str) -> None:
    """`none` from any kernel that a layer needs means chain for that layer, with the kernel's own words."""
    kernels = {key: Kernel(SpecLimit("none", "too wide")) if key == declining else Kernel() for key in (GDN, STATE)}
    registry = KernelRegistry([lambda: kernels])
    assert registry.limit(recurrent()) == SpecLimit("chain", "too wide")
    assert [kernel.asked for kernel in kernels.values()] == [["layer 1"], ["layer 1"]]


def test_a_layer_verifies_what_every_kernel_it_needs_supports() -> None:
    """The minimum of verify and commit holds, and a layer with nothing to commit needs no commit kernel."""
    tree_only = SpecLimit("tree", "a state folds every ancestor in")
    registry = KernelRegistry([lambda: {GDN: Kernel(tree_only), STATE: Kernel()}])
    assert registry.limit(recurrent()) == tree_only
    no_commit = LayerDescriptor(name="layer 2", verify_key=GDN, commit_key=None)
    assert KernelRegistry([lambda: {GDN: Kernel()}]).limit(no_commit) == SpecLimit("mask")
    # A provider's refusal is final: the built-in kernel that it replaced is not asked.
    declined = KernelRegistry([lambda: {FULL: Kernel(SpecLimit("none", "no"))}])
    assert declined.limit(attention()) == SpecLimit("chain", "no")


def test_capabilities_are_the_minimum_over_layers_and_settings() -> None:
    """A rank reports the lowest kind of its layers and settings, with every reason below mask, without repeats."""
    tree_only = SpecLimit("tree", "a state folds every ancestor in")
    registry = KernelRegistry([lambda: {GDN: Kernel(tree_only), STATE: Kernel()}])
    layers = [attention(), recurrent(), recurrent(), attention()]
    found = registry.capabilities(layers)
    assert (found.kind, found.reasons) == ("tree", (tree_only.reason,))
    lowered = registry.capabilities(layers, [SpecLimit("chain", "pipeline parallelism")])
    assert (lowered.kind, lowered.reasons) == ("chain", (tree_only.reason, "pipeline parallelism"))
    refused = registry.capabilities(layers, [SpecLimit("none", "a Mamba1 layer")])
    assert refused.kind == "none"


@pytest.mark.parametrize(("resources", "paged"), [(CHAIN, 0), (TREE, 1), (MASK, 1)])
def test_paged_commit_is_bound_above_chains_and_everything_else_always(resources: SpecResources, paged: int) -> None:
    """A chain needs no KV commit; verify kernels and the recurrent commit are bound with the effective resources."""
    kernels = {PAGED: Kernel(), FULL: Kernel(), GDN: Kernel(), STATE: Kernel()}
    KernelRegistry([lambda: kernels]).bind(resources)
    assert {key: len(kernel.bound) for key, kernel in kernels.items()} == {PAGED: paged, FULL: 1, GDN: 1, STATE: 1}
    assert all(bound is resources for kernel in kernels.values() for bound in kernel.bound)


def test_a_kernel_under_several_keys_is_bound_once() -> None:
    """One object may serve several keys; it is bound once, and also on chains if one of its keys is."""
    shared, paged_only = Kernel(), Kernel()
    keys = (FULL, "attention:sliding/verify", PAGED)
    KernelRegistry([lambda: dict.fromkeys(keys, shared)]).bind(CHAIN)
    assert shared.bound == [CHAIN]
    KernelRegistry([lambda: {PAGED: paged_only}]).bind(CHAIN)
    assert paged_only.bound == []


def test_replaced_kernels_are_not_bound() -> None:
    """What a later provider replaced is out: neither asked nor bound."""
    replaced, winner = Kernel(), Kernel()
    registry = KernelRegistry([lambda: {FULL: replaced}, lambda: {FULL: winner}])
    registry.bind(MASK)
    registry.limit(attention())
    assert (replaced.bound, replaced.asked) == ([], [])
    assert (winner.bound, winner.asked) == ([MASK], ["layer 0"])


def test_the_built_in_kernels_run_their_ops() -> None:
    """The registered objects are callable with the signature of their op and give its result."""
    case = build([tree(6, [-1, 0, 0, 2])], Setting(window=3, sinks=True, softcap=2.0), 0)
    registry = KernelRegistry()
    registry.bind(MASK)
    rows = lay_out_rows(case.num_rows, 16, case.context)
    found = registry.get("attention:sliding/verify")(
        case.query,
        case.key_cache,
        case.value_cache,
        rows,
        scale=case.scale,
        window=3,
        sinks=case.sinks,
        softcap=2.0,
    )
    assert (found.double() - oracle(case)).abs().max() < 1e-5
    cache = torch.arange(8.0).reshape(1, 8, 1)
    registry.get(PAGED)([cache], torch.tensor([6, 7]), torch.tensor([5, 6]))
    assert cache.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 7]


class Failing(Kernel):
    """A kernel whose start-up methods fail, or answer nonsense."""

    def __init__(self, supports: object = None, *, bind_fails: bool = False) -> None:
        super().__init__()
        self.answer, self.bind_fails = supports, bind_fails

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]

    def bind(self, resources: SpecResources) -> None:
        if self.bind_fails:
            raise ValueError("no room")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            ValueError("boom"),
            r"supports.. of kernel Failing for attention:full/verify, layer .* failed: ValueError: boom",
        ),
        ("tree", "returned 'tree': must be a SpecLimit"),
        (None, "returned None: must be a SpecLimit"),
    ],
)
def test_a_kernel_that_answers_nonsense_is_named(answer: object, message: str) -> None:
    """What fails inside a provider's `supports` names kernel, key and layer."""
    registry = KernelRegistry([lambda: {FULL: Failing(answer)}])
    with pytest.raises(KernelError, match=message):
        registry.limit(attention())


def test_a_kernel_that_cannot_be_bound_is_named() -> None:
    """What fails inside `bind` names the kernel."""
    registry = KernelRegistry([lambda: {FULL: Failing(SpecLimit("mask"), bind_fails=True)}])
    with pytest.raises(KernelError, match=r"bind.. of kernel Failing failed: ValueError: no room"):
        registry.bind(MASK)


def failing_provider() -> dict[str, Kernel]:
    raise RuntimeError("no driver")


@pytest.mark.parametrize(
    ("providers", "message"),
    [
        (5, "spec_kernel_providers=5: must be a sequence"),
        ("x", "spec_kernel_providers has 'x': must be a function"),
        ([5], "spec_kernel_providers has 5: must be a function"),
        ([failing_provider], "provider failing_provider failed: RuntimeError: no driver"),
    ],
)
def test_bad_providers_are_named(providers: Any, message: str) -> None:
    """Something that is no sequence of functions, or a function that fails, is an error that says so."""
    with pytest.raises(KernelError, match=message):
        KernelRegistry(providers)
