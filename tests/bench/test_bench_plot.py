"""The picture: drawn with matplotlib, refused before the measurement without."""

from __future__ import annotations

import sys

import pytest

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


def test_without_matplotlib_nothing_is_measured(bench, monkeypatch, tmp_path):
    """--plot without matplotlib is exit code 2 at once and says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("specround.bench.run_bench", None)
    finished = bench("--plot", str(tmp_path / "out.png"))
    assert (finished.code, finished.out) == (2, "")
    assert "specround[bench]" in finished.err
    assert not (tmp_path / "out.png").exists()


def test_with_matplotlib(bench, tmp_path):
    """With matplotlib a PNG is written, with and without the curve of rows."""
    pytest.importorskip("matplotlib")
    for curve in ("--row-curve", "--no-row-curve"):
        path = tmp_path / f"out{curve}.png"
        finished = bench("--no-peers", curve, "--speculative-config", NGRAM, "--kinds", "chat", "--plot", str(path))
        assert finished.code == 0
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_such_directory(bench, tmp_path):
    """A picture that could not be written is refused before the measurement."""
    pytest.importorskip("matplotlib")
    assert bench("--plot", str(tmp_path / "none" / "out.png")).code == 2
