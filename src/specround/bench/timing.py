"""`measure`: time every variant in turns, so that a machine that wavers wavers for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specround.bench.batches import BatchPrompts
from specround.bench.variants import Run, Variant

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


def measure(
    variants: Sequence[Variant], batches: Sequence[BatchPrompts], repeats: int, report: Progress
) -> dict[str, list[list[Run]]]:
    """Time every variant on every batch, in turns: each batch goes through all variants before the next one.

    The variant that comes first changes from batch to batch, so that what slows the machine down hits all alike.

    Returns:
        By variant: for each batch, its repeats.
    """
    samples: dict[str, list[list[Run]]] = {variant.name: [[] for _ in batches] for variant in variants}
    total, done = repeats * len(batches) * len(variants), 0
    for repeat in range(repeats):
        for place, batch in enumerate(batches):
            first = (repeat + place) % len(variants)
            for variant in [*variants[first:], *variants[:first]]:
                report("timing", done, total)
                samples[variant.name][place].append(variant.run(batch.token_ids))
                done += 1
    report("timing", total, total)
    return samples
