"""Settings of models with recurrent layers besides those of the tiny models: norms, biases, groups, ties, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_reference import ABSENT, RecurrentReference
from stateful_forward import StatefulForward
from test_families_logits import TOLERANCE, prompts_of
from test_recurrent_logits import BRANCHING, PARENTS, tree_error, trees_of, worst_of

from specround.contract import ModelError
from specround.models.pretrained import load_pretrained
from specround.models.sources import resolve_model
from tiny_models import tiny_model

_LINEAR, _FULL = "linear_attention", "full_attention"
TWO_BLOCKS = {
    "num_hidden_layers": 5,
    "num_mem_blocks": 2,
    "layers_block_type": [_LINEAR, "hybrid", "hybrid", _LINEAR, "hybrid"],
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bamba", {"tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("bamba", {"time_step_limit": (0.2, 0.6), "mamba_n_groups": 4}),
    ("falcon_h1", {"mamba_rms_norm": False, "projectors_bias": True}),
    ("falcon_h1", {"mamba_norm_before_gate": True, "mamba_n_groups": 1}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "nope"}),
    ("granitemoehybrid", {"layer_types": [_LINEAR, _LINEAR, _LINEAR]}),
    ("jamba", {"mamba_proj_bias": True, "num_experts": 1}),
    ("kimi_linear", {"layer_types": [_FULL, _LINEAR, _LINEAR], "routed_scaling_factor": 1.5}),
    ("lfm2", {"conv_bias": False, "conv_L_cache": 5, "tie_word_embeddings": True}),
    ("mamba", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    ("mamba", {"conv_kernel": 2, "residual_in_fp32": False}),
    ("mamba2", {"n_groups": 1, "use_bias": True, "residual_in_fp32": False}),
    ("nemotron_h", {"moe_latent_size": 16, "mlp_bias": True, "use_bias": True}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False} | ROPE),
    ("qwen3_5_text", {"linear_num_key_heads": 4, "tie_word_embeddings": True}),
    ("qwen3_next", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}),
    ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False, "tie_word_embeddings": True}),
    ("zamba2", TWO_BLOCKS),
]


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS, ids=lambda value: value if type(value) is str else "")
def test_variants_equal_the_reference(model_type: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Prompts, and trees where states branch, have the reference's logits with these settings too."""
    if model_type in ABSENT or (overrides is TWO_BLOCKS and transformers.__version__ < "5.24"):
        pytest.skip("this version of transformers is too old")
    reference, prompts = RecurrentReference(tiny_model(tmp_path, model_type, **overrides)), prompts_of(3)
    packed = StatefulForward(tmp_path, 4, 64, "replay")
    assert worst_of(packed.feed(prompts, [0] * 4, [True] * 4), reference, prompts, [0] * 4) <= TOLERANCE
    if reference.has_group_norm:
        with torch.no_grad():
            theirs = reference.original(input_ids=torch.tensor([prompts[1]]), use_cache=False).logits[0]
        assert worst_of(theirs, reference, [prompts[1]], [0]) <= TOLERANCE
    if model_type in BRANCHING:
        found = packed.verify_tree(trees_of(4), torch.tensor([PARENTS] * 4), [len(p) for p in prompts])
        assert tree_error(found, reference, prompts, trees_of(4)) <= TOLERANCE


def test_attention_only_members_of_a_hybrid_family(tmp_path: Path) -> None:
    """A checkpoint of a hybrid type may have no recurrent block at all; it then needs no states."""
    tiny_model(tmp_path, "granitemoehybrid", layer_types=[_FULL] * 3)
    packed = StatefulForward(tmp_path, 1, 64, "replay")
    assert packed.model.recurrent_layers == packed.model.limits == ()
    assert packed.model.state_bytes == (0, 0)
    reference, prompt = RecurrentReference(tmp_path), prompts_of(3)[1]
    assert worst_of(packed.extend([prompt], [0]), reference, [prompt], [0]) <= TOLERANCE


def test_adapters_of_the_wrong_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers gives a block the adapters of another one, the model is refused."""
    from transformers.models.zamba2 import modeling_zamba2

    tiny_model(tmp_path, "zamba2", **{**TWO_BLOCKS, "use_shared_attention_adapter": False})
    real = modeling_zamba2.Zamba2AttentionDecoderLayer.__init__

    def wrong(self: Any, config: Any, block_id: int | None = None, **rest: Any) -> None:
        real(self, config, block_id=0, **rest)

    monkeypatch.setattr(modeling_zamba2.Zamba2AttentionDecoderLayer, "__init__", wrong)
    with pytest.raises(ModelError, match=r"num_mem_blocks=2: must be 1 with this version of transformers"):
        load_pretrained(resolve_model(str(tmp_path)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("window", [None, 5])
def test_a_window_that_transformers_does_not_apply(tmp_path: Path, window: int | None) -> None:
    """A sliding window in the configuration of a type whose masks have none is refused."""
    tiny_model(tmp_path, "nemotron_h")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    if window is None:
        load_pretrained(resolve_model(str(tmp_path)), torch.float32, torch.device("cpu"))
    else:
        with pytest.raises(ModelError, match=r"sliding_window=5.*does not apply"):
            load_pretrained(resolve_model(str(tmp_path)), torch.float32, torch.device("cpu"))
