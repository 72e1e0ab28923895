"""A benchmark's result as a picture; needs matplotlib, which the extra `bench` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specround.bench.step_clock import PARTS
from specround.contract import ConfigError

_INSTALL = "used with matplotlib installed: pip install 'specround[bench]'"


def check_plotting(path: Path) -> None:
    """Find out before the measurement whether the picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or the directory does not exist.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("plot", str(path), _INSTALL) from error
    if not path.parent.is_dir():
        raise ConfigError("plot", str(path), "a file in a directory that exists")


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Draw speed by kind of prompts, the parts of a step, and the cost of rows.

    Args:
        result: What `run_bench` returned.
        path: The picture; its suffix chooses the format.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_plotting(path)
    from matplotlib.figure import Figure

    curve = result.get("row_curve") or {"rows": []}
    panels = 3 if curve["rows"] else 2
    figure = Figure(figsize=(6 * panels, 5), layout="constrained")
    axes = figure.subplots(1, panels)
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['hardware']['cpu']}")
    _draw_rates(axes[0], result["results"])
    _draw_steps(axes[1], result["steps"])
    if curve["rows"]:
        _draw_rows(axes[2], curve)
    figure.savefig(path, dpi=120)


def _draw_rates(axis: Any, results: dict[str, Any]) -> None:
    names = list(next(iter(results.values()))["variants"])
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        rates = [scoped["variants"][name]["tokens_per_s"] for scoped in results.values()]
        axis.bar([place + number * width for place in range(len(results))], rates, width, label=name)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(results))], list(results), rotation=30)
    axis.set_ylabel("tokens/s, prefill included")
    _legend(axis)


def _draw_steps(axis: Any, steps: dict[str, Any]) -> None:
    shown = {name: split for name, split in steps.items() if split["steps"]}
    below = [0.0] * len(shown)
    for part in PARTS:
        heights = [split["step_ms"] * split["share"][part] for split in shown.values()]
        axis.bar(list(shown), heights, bottom=below, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.set_ylabel("ms per decode step")
    _legend(axis)


def _draw_rows(axis: Any, curve: dict[str, Any]) -> None:
    rows = [entry["rows"] for entry in curve["rows"]]
    axis.plot(rows, [entry["cost"] for entry in curve["rows"]], marker="o")
    axis.axhline(1.0, linewidth=0.5)
    axis.set_xlabel(f"rows of one forward, context {curve['context']}")
    axis.set_ylabel("time over one row")
    axis.set_ylim(bottom=0)


def _legend(axis: Any) -> None:
    """A legend above the panel, where it covers nothing."""
    axis.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
