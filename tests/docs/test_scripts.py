"""The scripts, the constraints and the CI entry."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    "scripts/setup",
    "scripts/demo",
    "scripts/test",
    "scripts/setup-vllm",
    "scripts/overlay-vllm",
    "scripts/test-vllm",
    ".ci/run",
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid(name):
    """Each script can be executed and parses."""
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_ci_runs_the_readmes_test_command():
    """The CI entry runs `scripts/test`, which the README names, and nothing else."""
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ['exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/test"']
    assert "    scripts/test" in (ROOT / "README.md").read_text()


def test_constraints_lie_in_the_declared_ranges():
    """constraints.txt pins a torch that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
    assert declared["torch"] == "torch>=2.11,<2.15"
    assert (ROOT / "constraints.txt").read_text().splitlines() == ["torch==2.13.0", "transformers<5.25"]


def test_setup_refuses_other_pythons(tmp_path):
    """With a Python that is too old, or none, setup says what is needed and leaves nothing behind."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup").write_bytes((ROOT / "scripts/setup").read_bytes())
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    for python in (str(old), str(tmp_path / "none")):
        result = subprocess.run(
            ["bash", str(tmp_path / "scripts/setup")],
            env={"PATH": os.environ["PATH"], "PYTHON": python},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1
        assert "scripts/setup: error: " in result.stderr
        assert "3.13" in result.stderr
        assert not (tmp_path / ".venv").exists()


def test_setup_that_fails_leaves_no_environment(tmp_path):
    """When an installation fails, the half-made environment is removed, so that the next script makes it again."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup").write_bytes((ROOT / "scripts/setup").read_bytes())
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ "$1" = -c ]; then echo 3.11; else mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n'
        'case "$*" in *install*) exit 7;; esac\n'
    )
    python.chmod(0o755)
    command = ["bash", str(tmp_path / "scripts/setup")]
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 7
    assert not (tmp_path / ".venv").exists()
