"""Progress on stderr: a bar for loading and fetching, and one for generation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[int, int, str], None]
"""Called as (done, total, what)."""


def wants_progress(asked: bool | None) -> bool:
    """Whether to draw bars: as asked, else when stderr is a terminal."""
    return sys.stderr.isatty() if asked is None else asked


@contextmanager
def load_bar(shown: bool) -> Iterator[Report | None]:
    """A bar of tensors for `LLM(on_load=...)`, or None."""
    if not shown:
        yield None
        return
    with Progress(
        TextColumn("loading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=_console()
    ) as bar:
        yield _reporter(bar)


@contextmanager
def fetch_bar(shown: bool) -> Iterator[Report | None]:
    """A bar of bytes for `fetch_model`, or None."""
    if not shown:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console()) as bar:
        yield _reporter(bar)


@contextmanager
def phase_bar(shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar of one phase after another; call it with (phase, done, total)."""
    if not shown:
        yield lambda phase, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console()) as bar:
        task, current = bar.add_task(""), ""

        def report(phase: str, done: int, total: int) -> None:
            nonlocal current
            if phase != current:
                current = phase
                bar.reset(task, description=phase, total=total)
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def generation_bar(shown: bool, num_requests: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of finished requests; call it with (tokens just delivered, requests just finished)."""
    if not shown:
        yield lambda tokens, finished: None
        return
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_console()) as bar:
        task, total = bar.add_task("", total=num_requests, tokens=0), 0

        def advance(tokens: int, finished: int) -> None:
            nonlocal total
            total += tokens
            bar.update(task, advance=finished, tokens=total)

        yield advance


def _console() -> Console:
    return Console(stderr=True)


def _reporter(bar: Progress) -> Report:
    task = bar.add_task("", total=None)

    def report(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, description=what)

    return report
