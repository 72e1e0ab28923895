"""What a result says about where it was measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from specround.bench import hardware

ROOT = Path(__file__).parents[2]


def test_description_is_json(monkeypatch):
    """Processor, cores, threads and versions are there and can be written as JSON."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    found = hardware.describe_hardware(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["cpu"]
    assert found["cores"] >= found["usable_cores"] >= 1
    assert found["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert set(hardware.describe_versions()) >= {"python", "specround", "torch", "transformers"}


def test_commit_of_the_checkout_only(monkeypatch, tmp_path):
    """In a checkout the commit is git's; outside, or in a repository that does not track the package, it is None."""
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = hardware.describe_commit()
    assert (commit is None) == (head.returncode != 0)
    assert commit is None or commit["id"] == head.stdout.strip()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(hardware, "__file__", str(tmp_path / "a" / "b" / "hardware.py"))
    assert hardware.describe_commit() is None
