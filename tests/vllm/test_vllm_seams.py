"""The version guard, on sources: recorded seams, an installed vLLM if there is one, and small stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specround.contract import ConfigError
from specround.integrations.vllm import versions


def write_package(folder: Path, version: str, recorded: dict[str, dict[str, str]]) -> Path:
    """A package whose sources have exactly the recorded seams."""
    (folder / "_version.py").write_text(f"__version__ = version = {version!r}\n")
    for file, names in recorded.items():
        classes: dict[str, list[str]] = {}
        lines = []
        for name, signature in names.items():
            owner, _, function = name.rpartition(".")
            if owner:
                classes.setdefault(owner, []).append(f"    def {function}({signature}): ...")
            elif name[0].isupper():
                classes.setdefault(name, []).extend(f"    {field}: int" for field in signature.split(", ") if field)
            else:
                lines.append(f"def {name}({signature}): ...")
        for owner, body in classes.items():
            lines += [f"class {owner}:", *(body or ["    ..."])]
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("version", versions.supported_versions())
def test_each_supported_version_passes(tmp_path, version):
    """Sources with the recorded seams are accepted."""
    package = write_package(tmp_path, version, versions.recorded_seams()[version])
    assert versions.check_version(package) == version


def test_supported_versions():
    """Exactly the releases the documentation names."""
    assert versions.supported_versions() == ("0.32.0", "0.33.0")


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.33.1rc1"])
def test_other_versions_are_refused(tmp_path, version):
    """Any other version is refused with the list of supported ones."""
    package = write_package(tmp_path, version, {})
    with pytest.raises(ConfigError, match=r"exactly 0\.32\.0 or 0\.33\.0"):
        versions.check_version(package)


@pytest.mark.parametrize("change", ["signature", "missing", "field"])
def test_changed_sources_are_refused(tmp_path, change):
    """A release whose function or class differs is refused; the message names it."""
    recorded = json.loads(json.dumps(versions.recorded_seams()["0.33.0"]))
    file, name = {
        "signature": ("v1/worker/gpu/model_runner.py", "GPUModelRunner.sample"),
        "missing": ("v1/core/sched/scheduler.py", "Scheduler._free_request"),
        "field": ("v1/worker/gpu/input_batch.py", "InputBatch"),
    }[change]
    if change == "missing":
        del recorded[file][name]
    else:
        recorded[file][name] = "self, other" if change == "signature" else "req_ids"
    package = write_package(tmp_path, "0.33.0", recorded)
    with pytest.raises(ConfigError, match="its sources were changed") as caught:
        versions.check_version(package)
    assert f"{file}: {name}(" in str(caught.value)


def test_every_overridden_method_is_recorded():
    """What our classes override of vLLM's is recorded, so that a change of it is noticed. Reads our own sources."""
    import ast

    folder = Path(versions.__file__).parent
    bases = {
        "runner.py": ("RoundRunner", "v1/worker/gpu/model_runner.py", "GPUModelRunner"),
        "scheduler.py": ("RoundScheduler", "v1/core/sched/scheduler.py", "Scheduler"),
        "worker.py": ("RoundWorker", "v1/worker/cpu_worker.py", "CPUWorker"),
        "gpu_worker.py": ("RoundGPUWorker", "v1/worker/gpu_worker.py", "Worker"),
        "proposer.py": ("RoundProposer", "v1/worker/gpu/spec_decode/speculator.py", "BaseSpeculator"),
    }
    own = {"_requests", "_pool_state", "max_num_active_reqs"}
    for file, (name, source, base) in bases.items():
        tree = ast.parse((folder / file).read_text())
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        methods = {node.name for node in body if isinstance(node, ast.FunctionDef)} - own
        for version in versions.supported_versions():
            recorded = versions.recorded_seams()[version][source]
            missing = {method for method in methods if f"{base}.{method}" not in recorded} - {"__init__"}
            assert not missing, f"{name} overrides {missing}, which seams.json lacks for {version}"


@pytest.mark.vllm
def test_the_installed_vllm_has_the_recorded_seams():
    """The release in this environment is as it was when it was recorded."""
    assert versions.check_version() in versions.supported_versions()
