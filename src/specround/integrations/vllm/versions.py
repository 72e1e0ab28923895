"""The version guard: which vLLM releases are supported, and whether the installed one still has what we override.

Nothing here imports vLLM: its sources are parsed. `seams.json` records, for each supported version, the signature of
every function that is overridden or called, and the fields of every class that is read.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from specround.contract import ConfigError

Seams = Mapping[str, Mapping[str, str]]
"""Signatures by name, by file below the package."""

SEAMS_FILE: Final = Path(__file__).with_name("seams.json")
MISSING: Final = "missing"


@cache
def recorded_seams() -> dict[str, dict[str, dict[str, str]]]:
    """The recorded seams by version."""
    recorded: dict[str, dict[str, dict[str, str]]] = json.loads(SEAMS_FILE.read_text(encoding="utf-8"))
    return recorded


def supported_versions() -> tuple[str, ...]:
    """Exactly these releases are supported."""
    return tuple(recorded_seams())


def find_package() -> Path:
    """Where vLLM is installed, without importing it.

    Raises:
        ConfigError: It is not installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None or not found.submodule_search_locations:  # a folder is no package
        versions = " or ".join(supported_versions())
        allowed = f"installed, in version {versions}: scripts/setup-vllm makes .venv-vllm with it and with this package"
        raise ConfigError("vllm", None, allowed)
    return Path(next(iter(found.submodule_search_locations)))


def package_version(package: Path) -> str:
    """Version of an installed or unpacked vLLM, without a local part such as `+cpu`.

    Raises:
        ConfigError: The package does not say.
    """
    path = package / "_version.py"
    if path.is_file():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"} and isinstance(node, ast.Assign):
                value = node.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    return value.value.partition("+")[0]
    raise ConfigError("vllm", str(package), "a release, with its version in _version.py")


def read_seams(package: Path, wanted: Seams) -> dict[str, dict[str, str]]:
    """The wanted names as an installed or unpacked vLLM has them.

    Args:
        package: Folder of the package.
        wanted: Names by file; what they map to is not looked at.
    """
    found = {}
    for file, names in wanted.items():
        path = package / file
        known = dict(_definitions(ast.parse(path.read_text(encoding="utf-8")))) if path.is_file() else {}
        found[file] = {name: known.get(name, MISSING) for name in names}
    return found


def differences(recorded: Seams, found: Seams) -> list[str]:
    """One line per seam that is not as recorded.

    Args:
        recorded: What is expected.
        found: What there is.
    """
    return [
        f"{file}: {name}({found[file][name]}): must be ({signature})"
        for file, names in recorded.items()
        for name, signature in names.items()
        if found[file][name] != signature
    ]


def check_version(package: Path | None = None) -> str:
    """Refuse a vLLM that is not supported or that differs from the release it says to be.

    Args:
        package: Folder of the package; None = the installed one.

    Returns:
        The version.

    Raises:
        ConfigError: Names the version and every function or class that differs.
    """
    package = find_package() if package is None else package
    version = package_version(package)
    recorded = recorded_seams().get(version)
    if recorded is None:
        raise ConfigError("vllm.__version__", version, f"exactly {' or '.join(supported_versions())}")
    different = differences(recorded, read_seams(package, recorded))
    if different:
        raise ConfigError(f"vllm {version}", "; ".join(different), "as released: its sources were changed")
    return version


def _definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions with their parameters, classes with their annotated fields, by dotted name."""
    stack: list[tuple[str, Iterable[ast.AST]]] = [("", tree.body)]
    while stack:
        prefix, body = stack.pop()
        for node in body:
            if isinstance(node, ast.ClassDef):
                names = [item.target.id for item in node.body if _is_field(item)]  # type: ignore[attr-defined]
                yield prefix + node.name, ", ".join(names)
                stack.append((f"{prefix}{node.name}.", node.body))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + node.name, ast.unparse(node.args)


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
