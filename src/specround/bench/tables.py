"""A benchmark's result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from specround.bench.step_clock import PARTS


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """The tables, in reading order.

    Args:
        result: What `run_bench` returned.
    """
    yield _gate(result)
    yield _rates(result)
    yield _steps(result)
    if result.get("row_curve"):
        yield _row_curve(result["row_curve"])


def _gate(result: dict[str, Any]) -> Table:
    table = Table(title="greedy outputs against plain decoding", title_justify="left")
    for heading in ("variant", "equal", "required"):
        table.add_column(heading)
    required = {"equal": "equal", "ties": "equal up to ties", "nothing": "nothing"}
    for name, each in result["gate"].items():
        table.add_row(name, f"{each['equal_share']:.0%}", required[each["required"]])
    return table


def _rates(result: dict[str, Any]) -> Table:
    packed = result["settings"]["engine"].get("quantization")
    kind = result["dtype"] if packed is None else f"{packed} ({result['dtype']})"
    table = Table(title=f"{result['model']}, {kind}, batch {result['settings']['batch']}", title_justify="left")
    table.add_column("prompts")
    table.add_column("variant")
    for heading in ("tokens/s", "x plain", "decode tokens/s", "x plain", "tokens/round", "accepted/drafted", "spread"):
        table.add_column(heading, justify="right")
    for scope, scoped in result["results"].items():
        for name, each in scoped["variants"].items():
            baseline = " (baseline)" if name == scoped["baseline"] else ""
            drafts = "" if not each["drafted"] else f"{each['accepted']}/{each['drafted']}"
            table.add_row(
                scope,
                name + baseline,
                f"{each['tokens_per_s']:.1f}",
                f"{each['speedup']:.2f}",
                _number(each["decode_tokens_per_s"], ".1f"),
                _number(each["decode_speedup"], ".2f"),
                f"{each['tokens_per_round']:.2f}",
                drafts,
                _number(each["spread"], ".0%"),
            )
        table.add_section()
    return table


def _steps(result: dict[str, Any]) -> Table:
    steps = {name: split for name, split in result["steps"].items() if split["steps"]}
    table = Table(title="share of a decode step", title_justify="left")
    table.add_column("part")
    for name in steps:
        table.add_column(name, justify="right")
    for part in PARTS:
        table.add_row(part, *(f"{split['share'][part]:.1%}" for split in steps.values()))
    table.add_section()
    lines = {
        "step, ms": ("step_ms", ".2f"),
        "rows per step": ("rows_per_step", ".1f"),
        "round overhead": ("round_overhead_share", ".1%"),
        "step overhead": ("step_overhead_share", ".1%"),
        "scheduler, us per step": ("scheduler_us_per_step", ".0f"),
        "scheduler, us per request": ("scheduler_us_per_request", ".0f"),
        "outside steps, us per token": ("outside_step_us_per_token", ".0f"),
    }
    for title, (key, form) in lines.items():
        table.add_row(title, *(format(split[key], form) for split in steps.values()))
    return table


def _row_curve(curve: dict[str, Any]) -> Table:
    table = Table(title=f"cost of rows, context {curve['context']}", title_justify="left")
    for heading in ("rows", "forward, ms", "logits, ms", "x one row"):
        table.add_column(heading, justify="right")
    for entry in curve["rows"]:
        table.add_row(
            str(entry["rows"]), f"{entry['forward_ms']:.2f}", f"{entry['logits_ms']:.2f}", f"{entry['cost']:.2f}"
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
