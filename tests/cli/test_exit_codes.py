"""Exit codes and one-line errors of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from specround.cli import main
from specround.contract import ModelError
from tiny_models import tiny_model

GENERATE = ("generate", "--model", "/no/such/model", "--prompt", "a")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), "COMMAND"),
        (("nonsense",), "nonsense"),
        (("generate",), "--prompt"),
        (("generate", "--prompt", "a", "--prompts", "-"), "--prompts"),
        ((*GENERATE, "--nonsense"), "--nonsense"),
        ((*GENERATE, "--max-tokens", "many"), "--max-tokens"),
        ((*GENERATE, "--max-tokens", "0"), "max_tokens=0"),
        ((*GENERATE, "--temperature", "-1"), "temperature=-1.0"),
        ((*GENERATE, "--stop", ""), "stop"),
        ((*GENERATE, "--format", "xml"), "xml"),
        ((*GENERATE, "--output", "/no/such/directory/out"), "--output"),
        (("generate", "--prompts", "/no/such/file"), "/no/such/file"),
        ((*GENERATE, "--speculative-config", "{"), "--speculative-config"),
        ((*GENERATE, "--speculative-config", "[]"), "--speculative-config"),
        ((*GENERATE, "--speculative-config", '{"method": "suffixtree"}'), "suffix_tree"),
        ((*GENERATE, "--speculative-config", '{"method": "no_module:Config"}'), "no_module"),
        ((*GENERATE, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 0}'), "an integer >= 1"),
        ((*GENERATE, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "n": 3}'), "lookup_max"),
        ((*GENERATE, "--block-size", "0"), "block_size=0"),
        ((*GENERATE, "--block-size", "1000000000"), "block_size=1000000000"),
        (GENERATE, "model='/no/such/model'"),
        ((*GENERATE, "--model", ""), "model=''"),
        ((*GENERATE, "--dtype", "float8"), "dtype='float8'"),
        ((*GENERATE, "--quantization", "int3"), "quantization='int3'"),
        (("models", "./no-such-model"), "./no-such-model"),
        ((*GENERATE, "--device", "abacus"), "abacus"),
        (("fetch", "nonsense"), "smollm2"),
        (("models", "nonsense"), "nonsense"),
        (("demo", "--max-tokens", "0"), "--max-tokens"),
    ],
)
def test_usage_errors(specround, arguments, names):
    """Each wrong command line is refused before any work: code 2 and one line that names what is wrong."""
    result = specround(*arguments)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert result.err.startswith("specround: error: ")
    assert names in result.err


def test_debug_shows_the_traceback(specround):
    """--debug adds the traceback to an error and keeps its exit code."""
    result = specround(*GENERATE, "--debug")
    assert result.code == 2
    assert "Traceback" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--quantization", "int8"), 2, "quantization='int8'"),
        (("--max-model-len", "5000"), 2, "max_model_len=5000"),
        (
            ("--speculative-config", '{"method": "draft_model", "model": "/none", "num_speculative_tokens": 2}'),
            2,
            "/none",
        ),
        (("--device", "cpu"), 1, "config.json"),
    ],
)
def test_settings_that_do_not_fit_the_model(specround, capsys, tmp_path, arguments, code, word):
    """What the user wrote and the model does not offer is exit code 2; a file that cannot be loaded is 1."""
    tiny_model(tmp_path, "olmo2")
    capsys.readouterr()  # transformers shows progress while it saves
    if code == 1:
        (tmp_path / "config.json").write_text("{")
    result = specround("generate", "--model", str(tmp_path), "--prompt", "a", *arguments)
    assert (result.code, result.out, len(result.err.splitlines())) == (code, "", 1)
    assert word in result.err


def test_a_download_that_fails_is_no_usage_error(specround, monkeypatch):
    """A hub id that cannot be downloaded, and a packaged model that cannot be fetched, are exit code 1."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    def fail(alias: str, on_progress: object) -> None:
        raise ModelError("model", alias, "downloadable")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("specround.models.sources.installed_model_path", lambda package: None)
    monkeypatch.setattr("specround.models.fetch.fetch_model", fail)
    for arguments in (("generate", "--model", "org/name", "--prompt", "a"), ("fetch", "smollm2")):
        result = specround(*arguments)
        assert (result.code, len(result.err.splitlines())) == (1, 1)
        assert "download" in result.err


@pytest.mark.parametrize(
    ("source", "word"), [("def oops(:\n", "SyntaxError"), ("import sys; sys.exit(7)\n", "SystemExit: 7")]
)
def test_a_speculator_module_that_fails(specround, monkeypatch, tmp_path, source, word):
    """A broken module of the working directory is exit code 2 in one line, whatever it does when it is imported."""
    (tmp_path / "failing_speculator.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = '{"method": "failing_speculator:Config", "num_speculative_tokens": 2}'
    result = specround(*GENERATE, "--speculative-config", config)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert word in result.err


@pytest.mark.parametrize("command", [(), ("generate",), ("models",), ("fetch",), ("export",), ("bench",), ("demo",)])
def test_help(specround, command):
    """--help of every command is exit code 0 and, where there are arguments to learn, shows examples."""
    result = specround(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert command == ("demo",) or "examples:" in result.out


def test_version(specround):
    """--version prints the package's version."""
    from specround.version import __version__

    assert specround("--version") == (0, f"specround {__version__}\n", "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "specround: error: interrupted\n"),
        (BrokenPipeError(), 1, ""),
        (ZeroDivisionError("two\nlines"), 1, "specround: error: ZeroDivisionError: two lines\n"),
    ],
)
def test_what_ends_a_run(capsys, monkeypatch, error, code, line):
    """Ctrl-C is 130, a reader that went away is silent, a bug is one line: never a traceback."""

    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr("specround.cli.models.run", fail)
    assert main(["models"]) == code
    assert capsys.readouterr() == ("", line)


def test_models_lists_everything(specround):
    """`models` names aliases, model types, and every installed speculator with all of its fields."""
    import dataclasses

    from specround.contract import find_speculator

    result = specround("models")
    assert result.code == 0
    assert "smollm2" in result.out
    assert "model types: " in result.out
    assert "llama, mamba, mamba2, mistral, " in result.out
    for method in ("ngram", "suffix_tree", "draft_model"):
        assert f"\n  {method}  " in result.out
        assert all(f" {field.name} (" in result.out for field in dataclasses.fields(find_speculator(method)))


def test_models_describes_every_field():
    """Each field of each installed speculator has a description in its class's docstring."""
    import dataclasses

    from specround.cli.models import field_descriptions
    from specround.contract import find_speculator

    for method in ("ngram", "suffix_tree", "draft_model"):
        config = find_speculator(method)
        assert set(field_descriptions(config)) == {field.name for field in dataclasses.fields(config)}


def test_fetch_prints_the_path(specround, monkeypatch, tmp_path):
    """`fetch` prints where the file is, and downloads nothing when the model's package is installed."""
    monkeypatch.setattr("specround.models.sources.installed_model_path", lambda package: tmp_path / "model.gguf")
    monkeypatch.setattr("specround.models.fetch.fetch_model", None)
    assert specround("fetch", "smollm2") == (0, f"{tmp_path / 'model.gguf'}\n", "")


def test_fetch_shows_progress(specround, monkeypatch, tmp_path):
    """`fetch --progress` hands a bar to the download and keeps stdout for the path."""

    def fetch_model(alias, *, on_progress):
        on_progress(10, 10, "extracting")
        return tmp_path / alias

    monkeypatch.setattr("specround.models.sources.installed_model_path", lambda package: None)
    monkeypatch.setattr("specround.models.fetch.fetch_model", fetch_model)
    result = specround("fetch", "smollm2", "--progress")
    assert (result.code, result.out) == (0, f"{tmp_path / 'smollm2'}\n")
    assert "extracting" in result.err


def test_demo_on_a_tiny_model(specround, model):
    """`demo` compares three prompts, finds identical texts, and draws rounds."""
    result = specround("demo", "--model", model, "--max-tokens", "6")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("texts identical") == 3
    assert result.out.count("tokens per round") == 6
    assert "bonus" in result.out


def test_as_a_process(model):
    """The module works as a process: JSON lines through pipes, code 1 because one line is bad."""
    lines = '{"prompt": "a", "max_tokens": 2}\n{"prompt": ""}\n'
    command = [sys.executable, "-m", "specround.cli", "generate", "--model", model, "--prompts", "-"]
    finished = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert [set(json.loads(line)) >= {"text"} for line in finished.stdout.splitlines()] == [True, False]
    assert finished.stderr.startswith("specround: error: request 1: ")


@pytest.mark.skipif(sys.platform == "win32", reason="the shell closes the descriptors")
def test_streams_that_are_closed(model):
    """Without a stdout there is one line of error and exit code 1; without a stderr the text is still written."""

    def run(redirection: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specround.cli", "generate", "--model", model, "--prompt", "a", "--stats"]
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command, "--max-tokens", "2"]
        return subprocess.run(shell, capture_output=True, text=True, check=False)

    closed, silent, usual = run(">&-"), run("2>&-"), run("")
    assert (closed.returncode, closed.stderr) == (1, "specround: error: stdout is closed\n")
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, usual.stdout, "")
    assert "tokens/s" in usual.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_stdout_that_is_full():
    """Output that cannot be written is one line of error and exit code 1, without a second one at exit."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specround.cli", "models"]
        finished = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stderr.startswith("specround: error: OSError: ")
    assert len(finished.stderr.splitlines()) == 1


def test_the_wait_policy_is_chosen_before_torch():
    """The users' own `OMP_WAIT_POLICY` stays, and the command line chooses one without importing torch."""
    code = (
        "import os, sys; from specround.cli import main; main(['--version']); "
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"OMP_WAIT_POLICY": "ACTIVE"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "ACTIVE False"


def test_help_loads_no_torch():
    """`--help` and the errors of arguments do not import torch: they answer at once."""
    code = (
        "import sys; from specround.cli import main; main(['--help']); main(['generate', '--help']); "
        "main(['generate']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_public_entry_point():
    """The package's script is `specround.cli:main`."""
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="specround")
    assert script.load() is main
