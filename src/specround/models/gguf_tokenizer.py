"""Build a tokenizer from the vocabulary and merges of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specround.contract.errors import ModelError
from specround.models.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _qwen2_words() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: Final = {"gpt-2": _byte_level, "qwen2": _qwen2_words, "smollm": _digits_then_byte_level}
"""How text is split before merges apply, by the file's `tokenizer.ggml.pre`."""
_NORMALIZERS: Final = {"qwen2": normalizers.NFC}


def tokenizer_from_metadata(metadata: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Byte-level BPE with a pre-tokenizer of `PRE_TOKENIZERS`, and SentencePiece BPE without a space before the text, as
    Gemma has it, are built: a wrong chain would silently tokenise some texts differently.

    Args:
        metadata: From `read_gguf_header`.
        vocab_size: Rows of the model's embedding.

    Raises:
        ModelError: Another kind of tokenizer, or a vocabulary that does not fit together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError("tokenizer.ggml.model", kind, "'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not len(set(tokens)) == len(tokens) <= vocab_size:
        raise ModelError("tokenizer.ggml.tokens", len(tokens), f"unique and at most the {vocab_size} embedding rows")
    roles = _special_tokens(metadata, tokens)
    try:
        backend = _byte_level_bpe(tokens, metadata) if kind == "gpt2" else _sentencepiece_bpe(tokens, metadata)
        _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type"))
        _add_post_processor(backend, metadata, roles)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError("tokenizer.ggml.merges", type(error).__name__, f"built from the tokens ({error})") from error
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens=roles,
        chat_template=template if isinstance(template, str) else None,
        vocab_size=vocab_size,
    )


def _byte_level_bpe(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ModelError("tokenizer.ggml.pre", pre, f"one of {sorted(PRE_TOKENIZERS)}")
    pairs: list[tuple[str, str]] = []
    for index, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise ModelError(f"tokenizer.ggml.merges[{index}]", merge, "two tokens with a space between")
        pairs.append((left, right))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    if pre in _NORMALIZERS:
        backend.normalizer = _NORMALIZERS[pre]()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours the pair with the best-scored union merges first."""
    key = "tokenizer.ggml.add_space_prefix"
    if metadata.get(key) is not False:
        raise ModelError(key, metadata.get(key), "False: a space before the text is not reproduced")
    scores, types = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores", scores, f"a list of {len(tokens)} numbers")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError("tokenizer.ggml.token_type", types, f"a list of {len(tokens)} numbers")
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = _merges_by_score(vocabulary, scores, types)
    unk = unknown[0] if unknown else None
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[Any], types: list[Any]) -> list[tuple[str, str]]:
    """Every split of a normal token into two others, best-scored token first, longer first parts first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        if types[token_id] != _NORMAL:
            continue
        splits = [(token[:place], token[place:]) for place in range(1, len(token))]
        held = [
            (vocabulary[left], vocabulary[right], left, right)
            for left, right in splits
            if left in vocabulary and right in vocabulary
        ]
        found += [(float(scores[token_id]), len(left), len(right), left, right) for _, _, left, right in sorted(held)]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: object) -> None:
    """Mark control tokens as special; they and user-defined ones are matched in text before it is split."""
    if types is None:
        return
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError("tokenizer.ggml.token_type", types, f"a list of {len(tokens)} numbers")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _add_post_processor(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    begin = roles.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token") is True else None
    end = roles.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token") is True else None
    around = [token for token in (begin, end) if token is not None]
    if not around:
        return
    first = [f"{begin}:0"] if begin else []
    last = [f"{end}:0"] if end else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A:0", *last],
        pair=[*first, "$A:0", "$B:0", *last],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)],
    )


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise ModelError(f"tokenizer.ggml.{key}", token_id, f"an integer from 0 to {len(tokens) - 1}")
        found[f"{role}_token"] = tokens[token_id]
    return found


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ModelError(key, value, "a list of strings")
    return value
