"""`specround generate` in-process, on a tiny model."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from specround import LLM, SamplingParams
from specround.cli.requests import requests_of_lines

SUFFIX_TREE = json.dumps({"method": "suffix_tree", "num_speculative_tokens": 6})
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_text_equals_the_library_and_is_the_same_with_a_speculator(specround, model):
    """The printed text is `LLM.generate`'s, and a speculator does not change it."""
    expected = LLM(model).generate("the cat", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    plain = specround("generate", "--model", model, "--prompt", "the cat", "--max-tokens", "12")
    drafted = specround(
        *("generate", "--model", model, "--prompt", "the cat", "--max-tokens", "12"),
        *("--speculative-config", SUFFIX_TREE),
    )
    assert plain == (0, expected + "\n", "")
    assert drafted == plain


def test_several_prompts_are_headed_in_order(specround, model):
    """With several prompts each text stands under the number of its request."""
    result = specround("generate", "--model", model, "--prompt", "a", "--prompt", "b", "--max-tokens", "2")
    headings = [line for line in result.out.splitlines() if line.startswith("---")]
    assert (result.code, headings) == (0, ["--- request 0 ---", "--- request 1 ---"])


def test_json_lines_round_trip(specround, model, tmp_path):
    """Every kind of line is answered in order, under its id, and per-line fields replace the flags."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "the cat", "id": "first", "max_tokens": 3}\n'
        "\n"
        '{"prompt_token_ids": [5, 6, 7], "id": 17}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.8, "seed": 4}\n',
        encoding="utf-8",
    )
    result = specround(
        *("generate", "--model", model, "--prompts", str(source), "--output", str(target), "--max-tokens", "5"),
        *("--speculative-config", SUFFIX_TREE),
    )
    lines = lines_of(target.read_text(encoding="utf-8"))
    assert result == (0, "", "")
    assert [line["id"] for line in lines] == ["first", 17, 2]
    assert [len(line["token_ids"]) for line in lines] == [3, 5, 5]
    assert lines[1]["prompt_token_ids"] == [5, 6, 7]
    assert all(line["finish_reason"] == "length" and line["stop_reason"] is None for line in lines)
    assert all(line["metrics"]["committed"] == len(line["token_ids"]) for line in lines)
    again = {"prompt_token_ids": lines[2]["prompt_token_ids"]}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=5)
    assert LLM(model).generate(again, params)[0].outputs[0].token_ids == lines[2]["token_ids"]


def test_bad_lines_fail_alone(specround, model, tmp_path):
    """Each bad line gets one output line with an error, the others are complete, the exit code is 1."""
    bad = {
        "not JSON": b"{oops",
        "not an object": b"[1]",
        "not UTF-8": b'{"prompt": "\xff"}',
        "no prompt": b'{"max_tokens": 3}',
        "two prompts": b'{"prompt": "a", "prompt_token_ids": [1]}',
        "unknown field": b'{"prompt": "a", "max_token": 3}',
        "refused parameter": b'{"prompt": "a", "top_p": 0.5}',
        "bad value": b'{"prompt": "a", "max_tokens": 0}',
        "empty prompt": b'{"prompt": ""}',
        "outside the vocabulary": b'{"prompt_token_ids": [100000]}',
        "bad messages": b'{"messages": "hi"}',
        "bad id": b'{"prompt": "a", "id": [1]}',
        "repeated id": b'{"prompt": "a", "id": "good"}',
    }
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([b'{"prompt": "a", "id": "good"}', *bad.values(), b'{"prompt": "b", "id": "last"}']))
    result = specround("generate", "--model", model, "--prompts", str(source), "--max-tokens", "2")
    lines = lines_of(result.out)
    assert result.code == 1
    assert [line["id"] for line in lines] == ["good", *range(1, len(bad) + 1), "last"]
    assert [len(line.get("token_ids", ())) for line in lines] == [2, *[0] * len(bad), 2]
    assert all(set(line) == {"id", "error"} for line in lines[1:-1])
    assert len(result.err.splitlines()) == len(bad)
    assert all(line.startswith("specround: error: request ") for line in result.err.splitlines())


def test_stdin_and_text_format(specround, model, monkeypatch):
    """`--prompts -` reads stdin, `--format text` overrides the default of JSON lines."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "the cat"}\n')))
    arguments = ("--model", model, "--max-tokens", "4")
    from_stdin = specround("generate", *arguments, "--prompts", "-", "--format", "text")
    assert from_stdin == specround("generate", *arguments, "--prompt", "the cat")


def test_no_requests_is_no_work(specround, tmp_path):
    """An empty file gives no lines and no error, and no model is loaded for it."""
    (tmp_path / "empty.jsonl").write_text("\n")
    assert specround("generate", "--model", "/none", "--prompts", str(tmp_path / "empty.jsonl")) == (0, "", "")


def test_only_request_refused(specround, model):
    """A single bad prompt is an error line and exit code 1, as in a batch."""
    result = specround("generate", "--model", model, "--prompt", "", "--format", "jsonl")
    assert result.code == 1
    assert [set(line) for line in lines_of(result.out)] == [{"id", "error"}]
    assert result.err.startswith("specround: error: request 0: prompt=''")


def test_chat_wraps_prompts(specround, model):
    """`--chat` sends what the chat template makes of a user's message."""
    result = specround(
        "generate", "--model", model, "--prompt", "hi", "--chat", "--format", "jsonl", "--max-tokens", "1"
    )
    expected = LLM(model).tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert lines_of(result.out)[0]["prompt_token_ids"] == expected


def test_stop_and_sampling_flags(specround, model):
    """--stop, --seed and --temperature reach the request."""
    flags = ("--model", model, "--prompt", "the cat", "--temperature", "0.9", "--seed", "3", "--max-tokens", "12")
    text = specround("generate", *flags).out.rstrip("\n")
    stop = text[3:5]
    assert specround("generate", *flags, f"--stop={stop}").out == text[: text.index(stop)] + "\n"


def test_stats_on_stderr(specround, model):
    """--stats writes one line of counts to stderr and leaves stdout alone."""
    result = specround("generate", "--model", model, "--prompt", "a", "--max-tokens", "3", "--stats")
    assert result.err.startswith("rounds 3, drafted 0, accepted 0, committed 3, 1.00 tokens per round, ")
    assert "tokens/s" in result.err


def test_progress_when_asked(specround, model):
    """--progress draws both bars on stderr even when it is no terminal; stdout stays the same."""
    flags = ("generate", "--model", model, "--prompt", "a", "--max-tokens", "3")
    shown = specround(*flags, "--progress")
    assert shown.out == specround(*flags).out
    assert "loading" in shown.err
    assert "requests, 3 tokens" in shown.err


def test_show_rounds(specround, model):
    """--show-rounds draws every round before the text: counts, root, accepted path, bonus, no escape codes."""
    result = specround(
        *("generate", "--model", model, "--prompt", "1 2 3 1 2 3 1 2", "--max-tokens", "4", "--show-rounds"),
        *("--speculative-config", SUFFIX_TREE),
    )
    lines = result.out.splitlines()
    assert result.code == 0
    assert lines[0] == "request 0, round 1: drafts 0, accepted 0, committed 1"
    assert lines[1] == "└── '2' root"
    assert lines[2].startswith("    └── ")
    assert lines[2].endswith(" bonus")
    assert "\x1b" not in result.out


def test_rounds_are_drawn_beside_json_lines(specround, model):
    """With JSON lines on stdout the drawing goes to stderr, so that the lines stay readable by programs."""
    result = specround(
        *("generate", "--model", model, "--prompt", "a", "--max-tokens", "2", "--show-rounds", "--format", "jsonl")
    )
    assert len(lines_of(result.out)) == 1
    assert "request 0, round 1: drafts 0, accepted 0, committed 1" in result.err


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("1", False), ("", True)])
def test_colour_only_on_terminals_without_no_color(model, monkeypatch, no_color, coloured):
    """A terminal gets escape codes, unless NO_COLOR is set to something."""
    from specround.cli import main

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", "--model", model, "--prompt", "a", "--max-tokens", "2", "--show-rounds"]) == 0
    assert ("\x1b[" in terminal.getvalue()) == coloured
    assert "bonus" in terminal.getvalue()


def test_a_reader_that_goes_away(model, monkeypatch, capsys):
    """When nobody reads stdout any more, the run ends with code 1 and says nothing."""
    from specround.cli import main

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    code = main(["generate", "--model", model, "--prompt", "a", "--prompt", "b", "--max-tokens", "2"])
    assert (code, capsys.readouterr().err) == (1, "")


def test_results_do_not_cut_through_the_bar(model, monkeypatch, capsys):
    """With a bar on the terminal that shows the results, these come after the bar is done, and complete."""
    from specround.cli import main

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["generate", "--model", model, "--prompt", "a", "--prompt", "b", "--max-tokens", "2"]) == 0
    text = terminal.getvalue()
    assert text.rindex("2/2") < text.index("--- request 0 ---") < text.index("--- request 1 ---")


def test_dotted_method_in_the_working_directory(specround, model, monkeypatch):
    """A speculator in a module of the working directory can be named, and the text stays the same."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != EXAMPLES])
    monkeypatch.delitem(sys.modules, "tree_speculator", raising=False)
    flags = ("generate", "--model", model, "--prompt", "1 2 3 1 2 3 1 2", "--max-tokens", "8")
    config = json.dumps({"method": "tree_speculator:RecallConfig", "num_speculative_tokens": 6})
    drafted = specround(*flags, "--speculative-config", config)
    assert drafted == specround(*flags)
    assert drafted.code == 0
    assert sys.path[-1] == os.getcwd()


def test_the_working_directory_comes_last_and_once(monkeypatch, tmp_path):
    """It goes behind installed packages, stays where the user already put it, and may have been removed."""
    from specround.cli.search_path import add_working_directory

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    for before, after in ((["a", "b"], ["a", "b", here]), (["a", here, "b"], ["a", here, "b"])):
        monkeypatch.setattr(sys, "path", list(before))
        for _ in range(2):
            add_working_directory()
            assert sys.path == after
    if sys.platform != "win32":
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        add_working_directory()
        assert sys.path == after
        os.chdir(tmp_path)


@pytest.mark.parametrize("way", ["same name", "link", "stdin"])
def test_prompts_are_not_overwritten(specround, monkeypatch, tmp_path, way):
    """An output that is the file of the prompts is refused before any work, and the file stays as it was."""
    source, output, prompts = tmp_path / "in.jsonl", tmp_path / "in.jsonl", str(tmp_path / "in.jsonl")
    source.write_text('{"prompt": "a"}\n')
    if way == "link":
        output = tmp_path / "link.jsonl"
        output.symlink_to(source)
    with source.open() as stdin:
        if way == "stdin":
            monkeypatch.setattr(sys, "stdin", stdin)
            prompts = "-"
        result = specround("generate", "--model", "/none", "--prompts", prompts, "--output", str(output))
    assert (result.code, result.out) == (2, "")
    assert "argument --output: " in result.err
    assert "--prompts" in result.err
    assert source.read_text() == '{"prompt": "a"}\n'


def test_numbers_avoid_given_ids():
    """Ids stay unique: a line without one gets its number, or the next that no line, earlier or later, has."""
    given = [None, 5, None, "3", None, None, 0, None, 5, None, 9]
    lines = [json.dumps({"prompt": "a"} | ({} if name is None else {"id": name})).encode() for name in given]
    requests = requests_of_lines([*lines, b"{oops"], SamplingParams())
    ids = [request.id for request in requests]
    assert ids == [1, 5, 2, "3", 4, 6, 0, 7, 8, 10, 9, 11]
    assert [request.id for request in requests if request.error is not None] == [8, 11]
    assert "id=5: must be unique in the batch" in str(requests[8].error)


class Narrow(io.TextIOWrapper):
    """A stdout of ASCII, as under the C locale."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict")

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_text_that_stdout_cannot_express(model, monkeypatch, tmp_path, form):
    """Nothing is lost or fails on a narrow stdout: text is escaped, and JSON lines stay JSON with the same values."""
    from specround.cli import main

    names = ["grün", "\ud800"]
    lines = [json.dumps({"prompt": "a", "id": name, "max_tokens": 2}) for name in names]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = ["generate", "--model", model, "--prompts", str(tmp_path / "in.jsonl"), "--format", form]
    narrow = Narrow()
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main(arguments) == 0
    if form == "text":
        assert "--- request gr\\xfcn ---" in narrow.text
        assert "--- request \\ud800 ---" in narrow.text
        return
    assert [line["id"] for line in lines_of(narrow.text)] == names
    assert main([*arguments, "--output", str(tmp_path / "out.jsonl")]) == 0
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert [line["id"] for line in lines_of(written)] == names
    assert '"grün"' in written


def test_hook_failure_fails_every_request(specround, model, monkeypatch, tmp_path):
    """A speculator that raises ends the run: each request's line has the error, exit code 1, no traceback."""
    (tmp_path / "broken_speculator.py").write_text(
        "from dataclasses import dataclass\n"
        "from specround import BaseSpeculator, SpeculatorConfig\n"
        "class Broken(BaseSpeculator):\n"
        "    def plan(self, view):\n"
        "        raise ValueError('on purpose')\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class BrokenConfig(SpeculatorConfig):\n"
        "    def create(self, resources, host, device):\n"
        "        return Broken()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = specround(
        *("generate", "--model", model, "--prompt", "a", "--prompt", "b", "--format", "jsonl"),
        *("--speculative-config", '{"method": "broken_speculator:BrokenConfig", "num_speculative_tokens": 2}'),
    )
    assert result.code == 1
    assert all("on purpose" in line["error"] for line in lines_of(result.out))
    assert len(lines_of(result.out)) == 2
    assert "Traceback" not in result.err
