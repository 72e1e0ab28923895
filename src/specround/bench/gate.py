"""The gate: before anything is timed, speculation must generate what plain decoding generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specround.bench.batches import BatchPrompts
from specround.bench.step_clock import replaced
from specround.bench.variants import EngineVariant, Run, TokenIds
from specround.contract import SpecRoundError
from specround.engine import LLM, SamplingParams

TIE_TOLERANCE = 0.02
"""In 16-bit types, another choice between logits that differ by this share of the largest one is a tie."""


class GateError(SpecRoundError):
    """A speculator generates something else than plain decoding: nothing is timed."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first token at which a variant differs from plain decoding.

    Attributes:
        prompt: Id of the prompt.
        index: Index of the token in the output.
        expected: Plain decoding's token, None where it had ended.
        found: The variant's token, None where it had ended.
        gap: Largest logit less the logit of the found token, after the common tokens.
        scale: Largest absolute logit there.
    """

    prompt: str
    index: int
    expected: int | None
    found: int | None
    gap: float
    scale: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding of a 16-bit type explains it."""
        return self.gap <= TIE_TOLERANCE * self.scale


def agreement(batches: Sequence[BatchPrompts], plain: Sequence[Run], other: Sequence[Run]) -> float:
    """Share of the prompts for which two variants generate the same tokens."""
    pairs = [
        pair for one, two in zip(plain, other, strict=True) for pair in zip(one.token_ids, two.token_ids, strict=True)
    ]
    assert len(pairs) == sum(len(batch.ids) for batch in batches)
    return sum(one == two for one, two in pairs) / len(pairs)


def check_speculator(
    name: str,
    plain: EngineVariant,
    batches: Sequence[BatchPrompts],
    expected: Sequence[Run],
    found: Sequence[Run],
) -> dict[str, Any]:
    """Compare a speculator's outputs with plain decoding's.

    Args:
        name: The speculator.
        plain: Plain decoding, asked for logits where outputs differ.
        batches: The prompts.
        expected: Plain decoding's runs of them.
        found: The speculator's.

    Returns:
        Share of equal outputs and, for 16-bit types, the ties at which the others part.

    Raises:
        GateError: An output differs; in a 16-bit type, by more than a tie.
    """
    exact = plain.llm.engine.model.dtype == torch.float32
    ties = []
    for batch, one, two in zip(batches, expected, found, strict=True):
        for place, prompt in enumerate(batch.ids):
            if one.token_ids[place] == two.token_ids[place]:
                continue
            parting = _divergence(plain.llm, prompt, batch.token_ids[place], one.token_ids[place], two.token_ids[place])
            if exact or not parting.is_tie:
                raise GateError(_message(name, parting, exact=exact))
            ties.append({"prompt": parting.prompt, "index": parting.index, "gap": parting.gap, "scale": parting.scale})
    return {"equal_share": agreement(batches, expected, found), "required": "equal" if exact else "ties", "ties": ties}


def logits_after(llm: LLM, token_ids: TokenIds) -> torch.Tensor:
    """Logits `[V]` of the token after some tokens, by plain decoding."""
    seen: list[torch.Tensor] = []

    def spy(original: Callable[..., Any]) -> Callable[..., Any]:
        def logits(*arguments: Any) -> Any:
            seen.append(original(*arguments))
            return seen[-1]

        return logits

    with replaced(llm.engine.model, "logits", spy):
        llm.generate({"prompt_token_ids": list(token_ids)}, SamplingParams(temperature=0, max_tokens=1))
    return seen[-1][-1].float()


def _divergence(llm: LLM, prompt: str, context: TokenIds, expected: TokenIds, found: TokenIds) -> Divergence:
    shortest = min(len(expected), len(found))
    index = next((i for i in range(shortest) if expected[i] != found[i]), shortest)
    tokens = [output[index] if index < len(output) else None for output in (expected, found)]
    gap = scale = float("inf")
    if tokens[1] is not None and tokens[0] is not None:
        logits = logits_after(llm, (*context, *expected[:index]))
        gap, scale = float(logits.max() - logits[tokens[1]]), float(logits.abs().max())
    else:
        scale = 0.0  # one output goes on where the other stopped at the same token: never a tie
    return Divergence(prompt=prompt, index=index, expected=tokens[0], found=tokens[1], gap=gap, scale=scale)


def _message(name: str, parting: Divergence, *, exact: bool) -> str:
    allowed = "in float32 outputs must be equal"
    if not exact:
        allowed = f"at most {TIE_TOLERANCE} of the largest logit is a tie of a 16-bit type"
    return (
        f"{name} does not generate what plain decoding generates: prompt {parting.prompt}, token {parting.index}: "
        f"{parting.found} instead of {parting.expected}, whose logit is {parting.gap:.3g} higher (the largest is "
        f"{parting.scale:.3g}; {allowed}); nothing was timed"
    )
