"""Write `docs/models.md` from the table of families. Run it by hand; a test says when it is needed."""

from __future__ import annotations

from pathlib import Path

from specround.models.families import FAMILIES, REFUSED, Family
from specround.models.gguf_architectures import ARCHITECTURES
from specround.models.gguf_tokenizer import PRE_TOKENIZERS
from specround.models.rotary import HF_ROPE_TYPES, OWN_ROPE_TYPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
_LOGITS = {"_plain": "", "_softcapped": "soft cap", "_multiplied": "times a scale", "_divided": "divided by a scale"}
_WINDOWS = {"none": "none", "every layer": "every layer", "layer types": "by layer type"}

INTRODUCTION = """# Models

<!-- Written by tests/models/write_models_document.py from the table of families; change that table instead. -->

A model is a Hugging Face directory with safetensors, a GGUF file, a hub id or an alias. Its modules are those of
transformers; attention, caches and the round are specround's. A model type is supported when it stands in the table:
for each of them the tests hold that

- weights are those of `from_pretrained`, and greedy text is that of transformers' `generate`;
- logits of packed prompts and of trees deeper than the windows equal transformers' eager attention;
- with chains, trees, masks and a draft model, any block size and late results, the text is plain decoding's, and after
  every step every KV slot holds what transformers' own cache would hold, within 1e-4 of the largest entry (float32);
- a forward has no operator that waits for the device.

Every model type verifies masks, the highest plan kind.

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
    rows = [_row(name, family) for name, family in sorted(FAMILIES.items())]
    table = header + "| --- " * 7 + "|\n" + "".join(rows)
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
    return INTRODUCTION + table + NOTES + gguf + refused


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


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
