"""Prompts as JSON lines: `{"id": ..., "kind": ..., "prompt": ...}`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specround.contract import ConfigError

_FIELDS = ("id", "kind", "prompt")


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """One prompt.

    Attributes:
        id: Unique in the set.
        kind: What is asked for, such as "chat"; results are reported by kind.
        prompt: The text of the user.
    """

    id: str
    kind: str
    prompt: str


def default_prompts() -> Path | None:
    """The project's own prompts: inside an installed package, or in the checkout it runs from."""
    package = Path(__file__).parent
    for path in (package / "prompt_files", package.parents[2] / "benchmarks" / "prompts"):
        if path.is_dir():
            return path
    return None


def load_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of JSON lines, or every `.jsonl` file of a directory in the order of their names.

    Raises:
        ConfigError: A file cannot be read, a line is no prompt, or an id is there twice.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError("prompts", str(path), "a .jsonl file or a directory with .jsonl files")
    found: dict[str, BenchPrompt] = {}
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("prompts", str(file), f"a readable file of JSON lines ({error})") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompt = _prompt(line, f"{file.name}:{number}")
                if prompt.id in found:
                    raise ConfigError(f"{file.name}:{number}: id", prompt.id, "unique")
                found[prompt.id] = prompt
    return list(found.values())


def pick_prompts(
    prompts: Sequence[BenchPrompt], kinds: Sequence[str] | None, per_kind: int | None
) -> dict[str, list[BenchPrompt]]:
    """Prompts by kind.

    Args:
        prompts: All prompts.
        kinds: Kinds wanted, in this order; None = all, as they come.
        per_kind: The first so many of each kind; None = all.

    Raises:
        ConfigError: There is no prompt, or none of a wanted kind.
    """
    by_kind: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    wanted = tuple(by_kind) if kinds is None else tuple(dict.fromkeys(kinds))
    if not wanted:
        raise ConfigError("kinds", kinds, "at least one kind of prompts")
    for kind in wanted:
        if kind not in by_kind:
            raise ConfigError("kinds", kind, f"one of {', '.join(by_kind)}")
    return {kind: by_kind[kind][:per_kind] for kind in wanted}


def _prompt(line: str, place: str) -> BenchPrompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(place, line, f"a JSON object ({error})") from error
    whole = isinstance(fields, dict) and set(fields) == set(_FIELDS)
    if not whole or not all(isinstance(fields[name], str) and fields[name].strip() for name in _FIELDS):
        raise ConfigError(place, fields, "an object of the non-empty strings 'id', 'kind' and 'prompt'")
    return BenchPrompt(**fields)
