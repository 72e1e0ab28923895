"""`BatchPrompts`: prompts as tokens, in the groups that run at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specround.bench.prompts import BenchPrompt
from specround.bench.variants import TokenIds
from specround.contract import ConfigError

if TYPE_CHECKING:
    from specround.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class BatchPrompts:
    """Prompts that run at once.

    Attributes:
        kind: Their kind.
        ids: Their ids.
        token_ids: Their tokens.
    """

    kind: str
    ids: tuple[str, ...]
    token_ids: tuple[TokenIds, ...]


def make_batches(
    chosen: Mapping[str, list[BenchPrompt]], tokenizer: Tokenizer | None, size: int, chat_template: bool | None
) -> list[BatchPrompts]:
    """Tokenise prompts and group those of one kind; the last group is filled up from the first prompts.

    Args:
        chosen: Prompts by kind.
        tokenizer: The model's.
        size: Prompts of a batch.
        chat_template: Wrap prompts in the chat template; None = if there is one.

    Raises:
        ConfigError: The model has no tokenizer.
        RequestError: The template was asked for and there is none.
    """
    if tokenizer is None:
        raise ConfigError("model", None, "a model with a tokenizer: prompts are texts")
    templated = tokenizer.chat_template is not None if chat_template is None else chat_template

    def tokens(prompt: BenchPrompt) -> TokenIds:
        if templated:
            return tuple(tokenizer.apply_chat_template([{"role": "user", "content": prompt.prompt}]))
        return tuple(tokenizer.encode(prompt.prompt))

    batches = []
    for kind, prompts in chosen.items():
        ids = {prompt.id: tokens(prompt) for prompt in prompts}
        ring = list(ids)
        for start in range(0, len(ring), size):
            group = tuple(ring[(start + place) % len(ring)] for place in range(size))
            batches.append(BatchPrompts(kind=kind, ids=group, token_ids=tuple(ids[name] for name in group)))
    return batches
