"""The project's prompts, and how prompt files are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specround.bench.prompts import default_prompts, load_prompts, pick_prompts
from specround.contract import ConfigError

ROOT = Path(__file__).parents[2]
KINDS = {"chat", "code", "edit", "summarise", "extract", "maths"}


def test_our_prompts():
    """Six kinds of ten prompts each, in a file of their kind, with ids of the form kind-NN, all texts different."""
    prompts = load_prompts(ROOT / "benchmarks" / "prompts")
    assert len(prompts) == 60
    assert len({prompt.prompt for prompt in prompts}) == 60
    for kind in KINDS:
        ids = [prompt.id for prompt in load_prompts(ROOT / "benchmarks" / "prompts" / f"{kind}.jsonl")]
        assert ids == [f"{kind}-{number:02}" for number in range(1, 11)]
    assert {prompt.kind for prompt in prompts} == KINDS
    assert all(prompt.id.startswith(f"{prompt.kind}-") for prompt in prompts)
    assert all(prompt.prompt == prompt.prompt.strip() for prompt in prompts)


def test_copying_prompts_are_long():
    """Prompts with a text to copy from are some hundred tokens long, the others are short (3 to 5 letters a token)."""
    for prompt in load_prompts(ROOT / "benchmarks" / "prompts"):
        long = prompt.kind in ("edit", "summarise", "extract")
        assert (500 < len(prompt.prompt) < 2300) if long else (len(prompt.prompt) < 450), prompt.id


def test_our_prompts_are_the_default():
    """The command finds the prompts of the checkout, also through the link that makes them part of the package."""
    path = default_prompts()
    assert path is not None
    assert path.resolve() == (ROOT / "benchmarks" / "prompts").resolve()


def test_pick():
    """Kinds come in the order asked for, and the first prompts of each."""
    chosen = pick_prompts(load_prompts(ROOT / "benchmarks" / "prompts"), ["maths", "chat", "maths"], 2)
    assert {kind: [prompt.id for prompt in prompts] for kind, prompts in chosen.items()} == {
        "maths": ["maths-01", "maths-02"],
        "chat": ["chat-01", "chat-02"],
    }


GOOD = {"id": "a", "kind": "k", "prompt": "p"}


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (["{"], ":1"),
        ([json.dumps(GOOD), "[]"], ":2"),
        ([json.dumps(GOOD | {"prompt": " "})], ":1"),
        ([json.dumps(GOOD | {"prompt": 3})], ":1"),
        ([json.dumps(GOOD | {"tokens": 3})], ":1"),
        ([json.dumps({"id": "a", "kind": "k"})], ":1"),
        ([json.dumps(GOOD), "", json.dumps(GOOD)], ":3: id"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, place):
    """A line that is no prompt is refused with its file and number."""
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"mine.jsonl{place}"):
        load_prompts(path)


def test_an_empty_directory_is_refused(tmp_path):
    """A directory without prompts is an error, not a benchmark of nothing."""
    with pytest.raises(ConfigError, match="prompts="):
        load_prompts(tmp_path)
