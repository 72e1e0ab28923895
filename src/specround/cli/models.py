"""`specround models`: what can be loaded, which speculators there are, and what a model's layers verify."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specround.cli.parser import json_object

if TYPE_CHECKING:
    from specround.contract import SpeculatorConfig
    from specround.models.sources import PackagedModel

_DESCRIPTION = """\
List packaged models and whether they are on this computer, the model types that can be loaded, and every speculator
with the fields that --speculative-config takes. With the name of a speculator, describe it. With a model, load it and
show each layer: the highest plan kind it verifies and why not more, its kernels, and its memory per token.

examples:
  specround models
  specround models tree_speculator:RecallConfig     (in the directory of tree_speculator.py)
  specround models smollm2
  specround models ./my-model --dtype bfloat16 --json
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "models", help="list models and speculators", description=_DESCRIPTION
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a speculator, or a model as --model takes it")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="of a model (default: auto)")
    parser.add_argument(
        "--speculative-config", type=json_object, metavar="JSON", help="show a model with this speculator's kernels"
    )
    parser.add_argument("--json", action="store_true", help="describe models as JSON lines")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="progress bar on stderr (default: on a terminal)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the lists."""
    from specround.cli.search_path import add_working_directory
    from specround.contract import SpeculatorConfig, known_methods

    if arguments.names:
        add_working_directory()
        for name in arguments.names:
            if _is_model(name):
                _show_model(name, arguments)
            else:
                sys.stdout.write("\n".join(_speculator(name)) + "\n")
        return 0
    lines = [*_models(), "", "fields of every speculator", *_fields(SpeculatorConfig), "", "speculators"]
    lines += [f"  {line}" for method in known_methods() for line in _known_speculator(method)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _is_model(name: str) -> bool:
    """Whether a name is a model rather than a speculator: an alias, a path, a GGUF file or a hub id."""
    from specround.contract import known_methods
    from specround.models.sources import MODEL_ALIASES

    if name in MODEL_ALIASES or "/" in name or name.lower().endswith(".gguf"):
        return True
    return name not in known_methods() and Path(name).exists()


def _show_model(name: str, arguments: argparse.Namespace) -> None:
    from specround.cli.layers import describe_model, layer_table
    from specround.cli.output import colour_console
    from specround.cli.progress import load_bar, wants_progress

    with load_bar(wants_progress(arguments.progress)) as report:
        model = describe_model(name, arguments.dtype, arguments.speculative_config, report)
    if arguments.json:
        sys.stdout.write(json.dumps(model) + "\n")
        return
    sys.stdout.write(
        f"{name}: {model['model_type']}, {model['dtype']}, context {model['max_model_len']}, "
        f"{_verifies(model)}, {model['bytes_per_token']} bytes of KV per token{_states(model)}\n"
    )
    for reason in model["reasons"]:
        sys.stdout.write(f"  {reason}\n")
    colour_console().print(layer_table(model))


def _verifies(model: Mapping[str, Any]) -> str:
    kind = model["kind"]
    return "generates without speculation" if kind == "none" else f"verifies plans up to {kind}"


def _states(model: Mapping[str, Any]) -> str:
    size = model["bytes_per_request"]
    return f", {size} bytes of states per request" if size else ""


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
