"""Text to token ids and back, and chat messages to token ids, the same for every checkpoint format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specround.contract.errors import ModelError, RequestError
from specround.models.chat_template import ChatTemplate
from specround.models.weights import read_json_object

TOKENIZER_FILE = "tokenizer.json"
_CONVERTIBLE_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A fast tokenizer with the checkpoint's special tokens and chat template.

    Args:
        backend: The tokenizer; truncation and padding are switched off.
        special_tokens: Role to token text, for example `{"bos_token": "<s>", "eos_token": "</s>"}`.
        chat_template: Jinja source, or None for models without one.
        vocab_size: Rows of the model's embedding. Ids above the tokenizer's own are padding and decode to nothing.

    Attributes:
        vocab_size: Ids from 0 to below this can be decoded.
        bos_token_id: Id of `bos_token`, or None.
        eos_token_ids: Id of `eos_token`, as a tuple of none or one. What ends a generation is decided by the
            checkpoint's generation settings: see `Pretrained.eos_token_ids`.
        special_ids: Ids that `decode` leaves out by default.

    Raises:
        ModelError: The begin or end token is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        vocab_size: int = 0,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        roles = dict(special_tokens or {})
        ids: dict[str, int] = {}
        for role in ("bos_token", "eos_token"):
            if role not in roles:
                continue
            token = roles[role]
            token_id = backend.token_to_id(token)
            if token_id is None:
                raise ModelError(role, token, "a token of the vocabulary")
            ids[role] = token_id
        self.vocab_size = max([vocab_size - 1, *backend.get_vocab().values()]) + 1
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_ids: tuple[int, ...] = (ids["eos_token"],) if "eos_token" in ids else ()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._roles = roles
        self._template = None if chat_template is None else ChatTemplate(chat_template, roles)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, or None."""
        return None if self._template is None else self._template.source

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers and other engines load."""
        self._backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._roles}
        if self._template is not None:
            settings["chat_template"] = self._template.source
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text are recognised.

        Args:
            text: Any Unicode text.
            add_special_tokens: Add what the model expects around a text, such as the beginning-of-text token.

        Raises:
            RequestError: Not a string, or a string that is not valid Unicode (a lone surrogate).
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            raise RequestError("prompt", text, f"valid Unicode text ({error})") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not (yet) a whole character become U+FFFD.

        Raises:
            RequestError: An id is not an integer from 0 to below `vocab_size`.
        """
        return str(self._backend.decode(self._checked(ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's spelling of each id, None for padding ids.

        Raises:
            RequestError: An id is not an integer from 0 to below `vocab_size`.
        """
        return [self._backend.id_to_token(token_id) for token_id in self._checked(ids)]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text `apply_chat_template` encodes; same arguments, same errors."""
        if self._template is None:
            raise RequestError("messages", list(messages), "absent: this model has no chat template; send a prompt")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, as the model was trained to see it.

        Args:
            messages: Mappings with a "role" and usually a "content".
            add_generation_prompt: End with the opening of an assistant turn, so that the model answers.
            variables: More variables for the template, such as `tools`.

        Raises:
            RequestError: The model has no chat template, or the template refuses the messages.

        Example:
            >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, variables), add_special_tokens=False)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        checked = list(ids)
        for index, token_id in enumerate(checked):
            if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token_ids[{index}]", token_id, f"an integer from 0 to {self.vocab_size - 1}")
        return checked


def tokenizer_from_directory(directory: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory, or None when it holds no tokenizer files.

    `tokenizer.json` is taken as it stands: rebuilding it through a class name, as transformers does, can replace its
    pre-tokenizer (for SmolLM2 it loses the splitting of digits). Only without it are older formats converted.

    Args:
        directory: Holds `tokenizer.json`, or files that transformers can convert.
        vocab_size: Rows of the model's embedding.

    Raises:
        ModelError: A tokenizer file is corrupt or cannot be converted without running code of the checkpoint.
    """
    path = directory / TOKENIZER_FILE
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(str(path), type(error).__name__, f"a valid tokenizer ({error})") from error
    elif any((directory / name).is_file() for name in _CONVERTIBLE_FILES):
        backend = _converted(directory)
    else:
        return None
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(directory, config),
        chat_template=_chat_template(directory, config),
        vocab_size=vocab_size,
    )


def _converted(directory: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # missing conversion libraries, unknown classes and corrupt files all differ
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        raise ModelError("tokenizer", str(directory), f"a {TOKENIZER_FILE} or convertible to one ({reason})") from error
    backend: tokenizers.Tokenizer | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("tokenizer", type(converted).__name__, f"a fast tokenizer: add {TOKENIZER_FILE}")
    return backend


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    older = directory / "special_tokens_map.json"
    merged = (read_json_object(older) if older.is_file() else {}) | dict(config)
    found: dict[str, str] = {}
    for role, value in merged.items():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(text, str):
            found[role] = text
    return found


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(str(path), type(error).__name__, f"readable text ({error})") from error
    older = directory / "chat_template.json"
    found = config.get("chat_template") or (read_json_object(older).get("chat_template") if older.is_file() else None)
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelError("chat_template", type(found).__name__, "Jinja source, or a list with one named 'default'")
    return found
