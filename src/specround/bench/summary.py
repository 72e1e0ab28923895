"""From timed runs to figures: medians over repeats, rates, and ratios to the faster plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specround.bench.variants import Role, Run

OVERALL = "all"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One variant on some prompts.

    Attributes:
        tokens: Tokens generated in one repeat.
        seconds: Wall time of one repeat: the sum over batches of the median over repeats.
        spread: Slowest repeat less fastest, over the median repeat: how much the machine wavered; None
            with one repeat.
        tokens_per_s: Prefill included.
        decode_tokens_per_s: After the first token of each prompt; None when there is no other.
        tokens_per_round: Committed per round (per target forward, for a peer), the prefill's included.
        drafted: Drafts verified, None where it is not known.
        accepted: Drafts kept, None where it is not known.
        speedup: `tokens_per_s` over that of the baseline.
        decode_speedup: `decode_tokens_per_s` over that of the baseline.
    """

    tokens: int
    seconds: float
    spread: float | None
    tokens_per_s: float
    decode_tokens_per_s: float | None
    tokens_per_round: float
    drafted: int | None
    accepted: int | None
    speedup: float = 1.0
    decode_speedup: float | None = None


def figures_of(runs: Sequence[Sequence[Run]]) -> Figures:
    """Figures of one variant, without ratios.

    Args:
        runs: For each batch, its repeats; the tokens of the first one are counted.
    """
    firsts = [repeats[0] for repeats in runs]
    seconds = sum(statistics.median(run.seconds for run in repeats) for repeats in runs)
    decode_seconds = sum(statistics.median(run.decode_seconds for run in repeats) for repeats in runs)
    decode_tokens = sum(run.decode_tokens for run in firsts)
    totals = [sum(column) for column in zip(*([run.seconds for run in repeats] for repeats in runs), strict=True)]
    tokens = sum(run.num_tokens for run in firsts)
    drafted = [run.drafted for run in firsts if run.drafted is not None]
    accepted = [run.accepted for run in firsts if run.accepted is not None]
    return Figures(
        tokens=tokens,
        seconds=seconds,
        spread=(max(totals) - min(totals)) / statistics.median(totals) if len(totals) > 1 else None,
        tokens_per_s=tokens / seconds,
        decode_tokens_per_s=decode_tokens / decode_seconds if decode_tokens and decode_seconds > 0 else None,
        tokens_per_round=tokens / sum(run.rounds for run in firsts),
        drafted=sum(drafted) if len(drafted) == len(firsts) else None,
        accepted=sum(accepted) if len(accepted) == len(firsts) else None,
    )


def compare(figures: Mapping[str, Figures], roles: Mapping[str, Role]) -> tuple[dict[str, Figures], str]:
    """Add ratios to the faster of the plain variants.

    Args:
        figures: By variant.
        roles: By variant; at least one is "plain" or "peer_plain".

    Returns:
        The figures with ratios, and the name of the baseline.
    """
    plain = [name for name in figures if roles[name] in ("plain", "peer_plain")]
    baseline = max(plain, key=lambda name: figures[name].tokens_per_s)
    base = figures[baseline]
    # the faster at decoding may be another one: each ratio has the stronger baseline of its own
    decode_base = max((figures[name].decode_tokens_per_s or 0.0 for name in plain), default=0.0)
    compared = {}
    for name, each in figures.items():
        own = each.decode_tokens_per_s
        compared[name] = replace(
            each,
            speedup=each.tokens_per_s / base.tokens_per_s,
            decode_speedup=own / decode_base if own is not None and decode_base else None,
        )
    return compared, baseline


def summarise(
    kinds: Sequence[str], samples: Mapping[str, Sequence[Sequence[Run]]], roles: Mapping[str, Role]
) -> dict[str, dict[str, Any]]:
    """Figures for each kind of prompts and for all.

    Args:
        kinds: Kind of each batch.
        samples: By variant: for each batch, its repeats.
        roles: By variant.

    Returns:
        By kind, and under "all": `{"baseline": name, "variants": {name: figures}}`.
    """
    scopes = dict.fromkeys(kinds)
    result = {}
    for scope in [*scopes, OVERALL]:
        chosen = [place for place, kind in enumerate(kinds) if scope in (kind, OVERALL)]
        figures = {name: figures_of([runs[place] for place in chosen]) for name, runs in samples.items()}
        compared, baseline = compare(figures, roles)
        result[scope] = {"baseline": baseline, "variants": {name: asdict(each) for name, each in compared.items()}}
    return result
