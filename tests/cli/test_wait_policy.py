"""How threads wait: asleep while other programs use the processor, otherwise as the user or OpenMP says."""

from __future__ import annotations

import os

import pytest

from specround.cli.wait_policy import choose_wait_policy

IDLE = "cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n"


def chosen(monkeypatch: pytest.MonkeyPatch, *stats: str, given: str | None = None) -> str | None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    texts = list(stats)
    choose_wait_policy(lambda: texts.pop(0), sample_s=0)
    return os.environ.pop("OMP_WAIT_POLICY", None)


def stat(busy: int, idle: int) -> str:
    return IDLE.format(busy=busy, idle=idle)


def test_threads_sleep_on_a_busy_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than half a core in use: passive. On an idle computer nothing is set."""
    assert chosen(monkeypatch, stat(100, 100), stat(110, 130)) == "PASSIVE"
    assert chosen(monkeypatch, stat(100, 100), stat(104, 136)) is None


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that is set is not looked behind."""
    assert chosen(monkeypatch, given="ACTIVE") == "ACTIVE"


@pytest.mark.parametrize("text", ["", "intr 1 2 3", "cpu a b c d e", "cpu 1 2"])
def test_other_systems_keep_their_default(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What cannot be read decides nothing."""
    assert chosen(monkeypatch, text, text) is None
