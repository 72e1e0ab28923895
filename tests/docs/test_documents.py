"""The documents say what the code does: examples run, names exist, every field is explained."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import shlex
from pathlib import Path

import pytest

import specround
from specround import contract
from specround.cli.entry import build_parser
from specround.contract import KERNEL_KEYS, BaseSpeculator, SpeculatorConfig, find_speculator

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["README.md", "docs/round_contract.md"])
def test_python_examples_run(blocks, model, tmp_path, name):
    """The Python blocks of a document, one after the other, run as one program with a tiny model for SmolLM2."""
    program = "\n".join(blocks(name, "python"))
    assert '"smollm2"' in program
    path = tmp_path / "program.py"
    path.write_text(program.replace('"smollm2"', repr(model)))
    runpy.run_path(str(path), run_name=f"example_of_{path.parent.name}")


def test_commands_parse(blocks):
    """Every `specround` command of the README is one the parser takes, and its speculator exists."""
    commands = []
    for block in blocks("README.md", "bash"):
        commands += [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("specround ")]
    assert len(commands) >= 6
    for command in commands:
        build_parser().parse_args(shlex.split(command)[1:])


def test_links_and_paths_exist(document):
    """Relative links, and paths in backticks, lead to files of the repository."""
    for name in DOCUMENTS:
        text = document(name)
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        paths = re.findall(r"`((?:docs|examples|scripts|tests|src)/[\w./-]+)`", text)
        missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
        missing += [path for path in paths if not (ROOT / path).exists()]
        assert not missing, (name, missing)


def test_class_names_exist(document):
    """Every CamelCase name in backticks is a class of the package, and `Class.name` one of its members."""
    members: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        own.add(each.target.id)
                    elif isinstance(each, ast.Assign):
                        own |= {target.id for target in each.targets if isinstance(target, ast.Name)}
                members[node.name] = members.get(node.name, set()) | own
    for name in DOCUMENTS:
        for cls, member in re.findall(
            r"`(?:specround\.\w+\.)?([A-Z][a-z]+[A-Z]\w*|LLM|KVCache)(?:\.(\w+))?[`(]", document(name)
        ):
            assert cls in members, (name, cls)
            assert not member or member in members[cls], (name, cls, member)


def test_every_type_of_the_contract_is_explained(document):
    """Each dataclass a speculator meets has a section in the contract whose table has exactly its fields."""
    sections = dict(
        re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", document("docs/round_contract.md"), re.DOTALL | re.MULTILINE)
    )
    types = {name: getattr(contract, name) for name in contract.__all__}
    expected = {name for name, cls in types.items() if isinstance(cls, type) and dataclasses.is_dataclass(cls)}
    assert set(sections) == expected
    for name, text in sections.items():
        rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
        named = [field for row in rows for field in re.findall(r"`(\w+)`", row)]
        assert named == [field.name for field in dataclasses.fields(types[name]) if field.init], name


def test_every_hook_is_explained(document):
    """The hook tables name exactly the hooks that can be overridden, with their parameters."""
    text = document("docs/round_contract.md")
    tables = text[: text.index("\nRules:\n")]
    named = dict(re.findall(r"^\| `(\w+)\((.*?)\)", tables, re.MULTILINE))
    expected = {}
    for cls in (SpeculatorConfig, BaseSpeculator):
        for name, member in vars(cls).items():
            if callable(member) and not name.startswith("_"):
                parameters = member.__code__.co_varnames[1 : member.__code__.co_argcount]
                expected[name] = ", ".join(parameters)
    assert named == expected


def test_every_kernel_key_is_explained(document):
    """The registry's table has exactly the known keys."""
    assert sorted(
        re.findall(
            r"`(\w+:[\w@]+/\w+)`",
            document("docs/round_contract.md").split("## Kernel registry")[1].split("Built-in kernels")[0],
        )
    ) == sorted(KERNEL_KEYS)


def test_every_setting_is_named_in_the_readme(document):
    """The README names every field of every built-in speculator, and every setting of the engine."""
    from specround.engine import EngineConfig

    named = set(re.findall(r"`(\w+)`", document("README.md"))) | {"model", "speculative_config"}
    configs = [EngineConfig, *(find_speculator(method) for method in ("ngram", "suffix_tree", "draft_model"))]
    assert not {field.name for config in configs for field in dataclasses.fields(config)} - named


def test_limits_in_the_readme_are_those_of_the_code(document):
    """The README's table of settings has the caps, defaults and model types that the code has."""
    from specround.engine.config import MAX_NUM_DRAFTS, MAX_SETTING, EngineConfig
    from specround.models.fusion import FUSED_MODEL_TYPES

    text = document("README.md")
    rows = dict(re.findall(r"^\| (`\w+`(?: or `\w+`)?) \| (.*) \|$", text, re.MULTILINE))
    assert (MAX_SETTING["max_num_batched_tokens"], MAX_SETTING["num_blocks"]) == (2**20, 2**24)
    assert f"at most {MAX_NUM_DRAFTS}; trees have at most 63" in text
    for name in ("max_num_seqs", "block_size"):
        assert f"1 to {MAX_SETTING[name]}" in rows[f"`{name}`"]
    assert "2^20" in rows["`max_num_batched_tokens`"]
    assert "2^24" in rows["`kv_cache_memory_bytes` or `num_blocks`"]
    assert all(f"`{name}`" in rows["`quantization`"] for name in FUSED_MODEL_TYPES)
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "seed", "cuda_graphs", "record_rounds"):
        assert rows[f"`{name}`"].endswith(f"| {defaults[name]}"), name


def test_refused_parameters_are_named_in_the_readme(document):
    """The README lists every sampling parameter that is refused today."""
    from specround.engine.sampling_params import _NOT_YET

    text = document("README.md")
    prose = {
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
    }
    assert all(f"`{name}`" in text for name in set(_NOT_YET) - prose)
    assert all(word in text for word in ("penalties", "log-probabilities", "structured outputs"))


def test_public_names_have_not_moved():
    """The names that the documents import from the top of the package are exported there."""
    documented = re.findall(r"from specround import (.*)", "".join((ROOT / name).read_text() for name in DOCUMENTS))
    names = {name.strip() for line in documented for name in line.split(",")}
    assert names <= set(specround.__all__)
