"""`specround models`: what can be loaded, and which speculators there are."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specround.contract import SpeculatorConfig
    from specround.models.sources import PackagedModel

_DESCRIPTION = """\
List packaged models and whether they are on this computer, the model types that can be loaded, and every speculator
with the fields that --speculative-config takes.

examples:
  specround models
  specround models tree_speculator:RecallConfig     (in the directory of tree_speculator.py)
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "models", help="list models and speculators", description=_DESCRIPTION
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="describe only these speculators")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the lists."""
    from specround.cli.search_path import add_working_directory
    from specround.contract import SpeculatorConfig, known_methods

    if arguments.methods:
        add_working_directory()
        lines = [line for method in arguments.methods for line in _speculator(method)]
    else:
        lines = [*_models(), "", "fields of every speculator", *_fields(SpeculatorConfig), "", "speculators"]
        lines += [f"  {line}" for method in known_methods() for line in _known_speculator(method)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _models() -> Iterator[str]:
    from specround.models.pretrained import SUPPORTED_MODEL_TYPES
    from specround.models.sources import MODEL_ALIASES

    yield "packaged models"
    for alias, package in MODEL_ALIASES.items():
        size = f"{package.size / 1e6:.0f} MB"
        yield f"  {alias}  {package.member.rpartition('/')[2]}, {size}, {package.licence}: {_state(alias, package)}"
    yield ""
    yield f"model types: {', '.join(SUPPORTED_MODEL_TYPES)}"
    yield "  as a Hugging Face directory with safetensors, a .gguf file, or a hub id (org/name)"


def _state(alias: str, package: PackagedModel) -> str:
    from specround.models.sources import cached_model_path, installed_model_path, is_pinned_file

    if installed_model_path(package) is not None:
        return f"installed with the package {package.distribution}"
    if is_pinned_file(cached_model_path(alias), package):
        return f"fetched to {cached_model_path(alias)}"
    return f"not on this computer; run `specround fetch {alias}`"


def _known_speculator(method: str) -> list[str]:
    """Like `_speculator`, but one that cannot be loaded does not hide the others."""
    from specround.contract import ConfigError

    try:
        return list(_speculator(method))
    except ConfigError as error:
        return [f"{method}  cannot be loaded: {error}"]


def _speculator(method: str) -> Iterator[str]:
    from specround.contract import SpeculatorConfig, find_speculator

    config = find_speculator(method)
    summary = (config.__doc__ or "").strip().split("\n")[0]
    own_text = "" if summary.startswith(f"{config.__name__}(") else summary  # dataclass writes its signature there
    yield f"{method}  {own_text}".rstrip()
    yield from _fields(config, leaving_out={field.name for field in dataclasses.fields(SpeculatorConfig)})


def _fields(config: type[SpeculatorConfig], leaving_out: Collection[str] = ()) -> Iterator[str]:
    described = field_descriptions(config)
    for field in dataclasses.fields(config):
        if field.init and field.name not in leaving_out:
            yield f"  {field.name} ({_default(field)})  {described.get(field.name, '')}".rstrip()


def field_descriptions(config: type[SpeculatorConfig]) -> dict[str, str]:
    """Each field's description, from the docstrings of the class and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        section = re.search(
            r"^Attributes:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(cls.__doc__ or ""), re.DOTALL | re.MULTILINE
        )
        entries = [] if section is None else re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section[1], re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"default {field.default!r}"
    return "required" if field.default_factory is dataclasses.MISSING else f"default {field.default_factory()!r}"
