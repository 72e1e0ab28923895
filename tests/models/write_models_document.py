"""Write `docs/models.md` from the table of families. Run it by hand; a test says when it is needed."""

from __future__ import annotations

from pathlib import Path

from specround.models.families import FAMILIES, REFUSED
from specround.models.family import Family
from specround.models.gguf_architectures import ARCHITECTURES
from specround.models.gguf_tokenizer import PRE_TOKENIZERS
from specround.models.rotary import HF_ROPE_TYPES, OWN_ROPE_TYPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
_LOGITS = {
    "plain": "",
    "softcapped": "soft cap",
    "multiplied": "times a scale",
    "head_multiplied": "times a scale",
    "divided": "divided by a scale",
}
_WINDOWS = {"none": "none", "every layer": "every layer", "layer types": "by layer type"}

_STATES = {
    "bamba": "Mamba2",
    "falcon_h1": "Mamba2",
    "falcon_mamba": "Mamba1",
    "granitemoehybrid": "Mamba2",
    "jamba": "Mamba1",
    "kimi_linear": "Kimi Delta Attention",
    "lfm2": "short convolution",
    "mamba": "Mamba1",
    "mamba2": "Mamba2",
    "nemotron_h": "Mamba2",
    "olmo_hybrid": "Gated DeltaNet",
    "qwen3_5_text": "Gated DeltaNet",
    "qwen3_next": "Gated DeltaNet",
    "zamba2": "Mamba2",
}
"""What the recurrent layers of a family are."""

_BLOCKS = {
    ("linear_attention", "full_attention"): "attention or recurrent",
    ("conv", "full_attention"): "attention or recurrent",
    ("linear_attention",): "recurrent",
    ("hybrid",): "both, side by side",
    ("linear_attention", "hybrid"): "recurrent, some after attention with shared weights",
    ("linear_attention", "full_attention", "mlp", "moe"): "attention, recurrent, or neither",
}
"""What a block has, by the block types of a family."""

INTRODUCTION = """# Models

<!-- Written by tests/models/write_models_document.py from the table of families; change that table instead. -->

A model is a Hugging Face directory with safetensors, a GGUF file, a hub id or an alias. Its modules are those of
transformers; attention, recurrent layers, caches and the round are specround's. A model type is supported when it
stands in one of the two tables. For each type of the first, without recurrent layers, the tests hold that

- weights are those of `from_pretrained`, and greedy text is that of transformers' `generate`;
- logits of packed prompts and of trees deeper than the windows equal transformers' eager attention;
- with chains, trees, masks and a draft model, any block size and late results, the text is plain decoding's, and after
  every step every KV slot holds what transformers' own cache would hold, within 1e-4 of the largest entry (float32);
- a forward has no operator that waits for the device.

These types verify masks, the highest plan kind.

"""

STATES = """
## Recurrent layers

For each type of this table the tests hold that

- weights are those of `from_pretrained`, buffers that are computed from the configuration included;
- logits of prompts, packed, in chunks and token by token, of trees, and of what follows an accepted path equal a
  reference in plain loops, one token and one head at a time, with both ways of keeping drafts' states;
- that reference equals transformers' own forward, where that norms as the original implementations do;
- a forward has no operator that waits for the device.

"""

STATE_NOTES = """
- A recurrent state folds every ancestor in and cannot hide one, so a mask runs as a tree. A Mamba1 state has no kernel
  that verifies more than one token: models with such layers generate without speculation.
- At load a forward of one row shows that every block calls attention and its recurrent layer exactly as the
  configuration says. A recurrent module for which there is no mixer here is refused by name.
- The gated norm of Mamba2 layers is computed per group of B and C, always. Some versions of transformers norm over the
  full width where a model has several groups.
- Step sizes of Mamba2 are clamped to the configuration's limits in every row. transformers clamps them in prompts and
  not in single steps, so where a limit is reached its own decoding differs from its own prefill.
- States, and the gates and norms around them, are float32; the window of a convolution has the model's type.
- `qwen3_5_text` takes positions by time, height and width. In text they are equal.
- `kimi_linear` is not in transformers 5.16 yet: with a version that lacks a type, it is refused with that reason.
- Checkpoints of the type `qwen3_5` also read images; their text part is loaded alone, as `qwen3_5_text`.
- Layers for multi-token prediction and vision weights in such checkpoints are not loaded.
- `mamba`, `mamba2` and `falcon_mamba` have no positions and so no longest sequence; 131072 tokens stand for it.

"""

NOTES = f"""
- Windows come from the configuration, layer by layer, and are measured by position in the tree. At load a forward of
  one row shows what each layer asks of the attention hook; a window, sink, soft cap or mask that the configuration does
  not announce, or a layer that does not call the hook exactly once, is refused by name.
- Experts run as grouped matrix products. A row's experts depend on that row alone, up to rounding: where two experts'
  scores nearly tie, another number of rows in the batch can decide otherwise.
- `deepseek_v3` stores expanded keys and values, so a token takes as much memory as in a model without latents. Layers
  for multi-token prediction are not loaded.
- The rotary kinds {", ".join(f"`{kind}`" for kind in HF_ROPE_TYPES)} are taken from transformers.
  For {" and ".join(f"`{kind}`" for kind in OWN_ROPE_TYPES)} transformers looks at the longest request of a batch; here
  each row looks at its own position. These two work where the table says "any".

## Requests longer than the original length

With `longrope` a row at position p uses the short factors while p + 1 <= `original_max_position_embeddings`, and the
long ones after. Texts do not depend on the batch, on chunks or on speculation. A request that stays within the original
length gets exactly transformers' result. Past it, keys keep the rotation they were written with, as in transformers'
decoding with a cache, token by token: such a request mixes both rotations, which these models were not trained for.
`generate` avoids that: it rotates a long prompt with the long factors from its first token, and computes the cache
again when a request crosses the original length. That is not done here, so with `longrope` `max_model_len` is the
original length unless you set another one.

## GGUF

"""


def document() -> str:
    """The whole text."""
    header = "| model type | sliding windows | attention | final logits | experts | rotary kinds | GGUF |\n"
    rows = [_row(name, family) for name, family in sorted(FAMILIES.items()) if not family.recurrent]
    table = header + "| --- " * 7 + "|\n" + "".join(rows)
    state_header = "| model type | recurrent layers | blocks | verifies | final logits | experts |\n"
    state_rows = [_state_row(name, family) for name, family in sorted(FAMILIES.items()) if family.recurrent]
    states = STATES + state_header + "| --- " * 6 + "|\n" + "".join(state_rows) + STATE_NOTES
    splits = ", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS))
    architectures = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES))
    gguf = (
        f"Architectures {architectures}, in every storage type that the gguf package can convert; weights become\n"
        f"float32. Tokenizers: byte-level BPE that splits text as {splits} do, and SentencePiece BPE without\n"
        "a space before the text. Anything else is refused by name.\n"
    )
    reasons = "".join(f"| `{name}` | {reason} |\n" for name, reason in sorted(REFUSED.items()))
    refused = (
        "\n## Refused\n\nEvery other model type is refused at load. For some the message gives the reason:\n\n"
        f"| model type | reason |\n| --- | --- |\n{reasons}\n"
        "Refused as well: pickled weights, quantised safetensors, code that comes with a checkpoint (never run),\n"
        "attention that sees later tokens, chunked attention, and weights that are missing, unexpected or of another\n"
        "shape.\n"
    )
    return INTRODUCTION + table + NOTES.replace("\n## GGUF\n\n", states + "## GGUF\n\n") + gguf + refused


def _row(name: str, family: Family) -> str:
    extras = ["sinks"] if family.has_sinks else []
    extras += ["soft cap"] if family.softcap else []
    extras += ["latents, expanded"] if name == "deepseek_v3" else []
    kinds = "any" if family.rotary_halves and not family.rope_by_layer_type else "of transformers"
    files = [architecture for architecture, entry in ARCHITECTURES.items() if entry.model_type == name]
    cells = [
        f"`{name}`",
        _WINDOWS[family.windows],
        ", ".join(extras),
        _LOGITS[family.final_logits.__name__],
        "grouped" if family.experts else "",
        kinds,
        ", ".join(f"`{architecture}`" for architecture in files),
    ]
    return "| " + " | ".join(cells).replace("  ", " ") + " |\n"


def _state_row(name: str, family: Family) -> str:
    cells = [
        f"`{name}`",
        _STATES[name],
        _BLOCKS[family.block_types],
        {"tree": "trees", "none": "nothing"}[family.verifies],
        _LOGITS[family.final_logits.__name__],
        "grouped" if family.experts else "",
    ]
    return "| " + " | ".join(cells).replace("  ", " ") + " |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
