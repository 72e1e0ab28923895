"""`specround bench` from end to end on a tiny model."""

from __future__ import annotations

import json
import os

import pytest
import torch

SUFFIX = '{"method": "suffix_tree", "num_speculative_tokens": 4}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


def test_table_and_json_line(bench, tmp_path):
    """Ours and transformers are measured by kind and overall; the tables and the last line say the same."""
    output = tmp_path / "result.json"
    finished = bench("--row-curve", "--output", str(output), "--repeats", "2")
    assert (finished.code, finished.err) == (0, "")
    result = finished.result
    assert json.loads(output.read_text()) == result
    names = ["plain", "suffix_tree", "ngram", "transformers", "transformers prompt lookup 10"]
    assert list(result["roles"]) == names
    assert list(result["results"]) == ["edit", "chat", "all"]
    overall = result["results"]["all"]["variants"]
    assert [overall[name]["tokens"] for name in names] == [18] * 5
    assert all(result["gate"][name]["equal_share"] == 1.0 for name in names[1:])
    rate = f"{overall['suffix_tree']['tokens_per_s']:.1f}"
    assert any("suffix_tree" in line and "all" in line and rate in line for line in finished.out.splitlines())
    assert result["hardware"]["threads"] == 1
    assert result["versions"]["torch"] == torch.__version__
    assert result["settings"]["speculators"]["ngram"] == {"method": "ngram", "num_speculative_tokens": 5}


def test_a_busy_machine_is_a_warning(bench, monkeypatch):
    """Figures of a machine with more work than cores, or of one repeat, come with a warning."""
    monkeypatch.setattr(os, "getloadavg", lambda: (99.5, 0.0, 0.0))
    finished = bench("--no-peers", "--speculative-config", NGRAM)
    assert "the machine is busy: a load of 99.5 on" in finished.err
    assert "one repeat shows no spread" in finished.err
    assert len(finished.result["warnings"]) == 2


def test_time_split_adds_up(bench):
    """Shares of a decode step add up to one, and plain decoding neither drafts nor takes more than a row."""
    steps = bench("--no-peers", "--speculative-config", SUFFIX).result["steps"]
    assert list(steps) == ["plain", "suffix_tree"]
    for split in steps.values():
        assert sum(split["share"].values()) == pytest.approx(1, abs=1e-4)
        assert split["step_overhead_share"] > split["round_overhead_share"] > 0
        assert split["share"]["forward"] > 0
    assert (steps["plain"]["steps"], steps["plain"]["rows_per_step"]) == (15, 1.0)


def test_row_curve(bench):
    """The curve has every row count from 1 to 64, and one row costs one row."""
    curve = bench("--no-peers", "--row-curve", "--per-kind", "1", "--kinds", "chat").result["row_curve"]
    assert [entry["rows"] for entry in curve["rows"]] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert curve["context"] == 256
    assert curve["rows"][0]["cost"] == 1.0
    assert all(entry["forward_ms"] > 0 for entry in curve["rows"])


def test_batches(bench):
    """With --batch, prompts of a kind run at once, the last batch is filled up, and prompt lookup is left out."""
    finished = bench("--batch", "2", "--speculative-config", NGRAM)
    result = finished.result
    assert list(result["roles"]) == ["plain", "ngram", "transformers"]
    assert result["results"]["all"]["variants"]["plain"]["tokens"] == 4 * 6
    assert result["steps"]["plain"]["requests_per_step"] > 1.5
    assert "prompt lookup takes one prompt" in finished.err
    assert result["gate"]["transformers"]["equal_share"] == 1.0


def test_peers_on_the_engines_weights(bench, tmp_path):
    """From a GGUF file transformers runs on the weights that the engine read, and generates the same."""
    from tiny_models import tiny_gguf

    model = tiny_gguf(tmp_path / "tiny.gguf", max_position=512)
    result = bench("--model", str(model), "--speculative-config", NGRAM).result
    assert result["gate"]["transformers"]["equal_share"] == 1.0
    assert result["gate"]["transformers prompt lookup 10"]["equal_share"] == 1.0
    peer = result["results"]["all"]["variants"]["transformers"]
    assert (peer["tokens_per_round"], peer["drafted"]) == (1.0, None)


@pytest.mark.parametrize("quantization", ["int4", "w8a8"])
def test_peers_beside_a_packed_model(bench, tmp_path, quantization):
    """The engine may pack its weights away: transformers reads the file for itself, unpacked."""
    from tiny_models import tiny_gguf

    model = tiny_gguf(tmp_path / "tiny.gguf", max_position=512)
    finished = bench(
        "--model", str(model), "--speculative-config", NGRAM, "--setting", f'quantization="{quantization}"'
    )
    assert finished.code == 0
    assert finished.result["gate"]["ngram"]["required"] == ("equal" if quantization == "w8a8" else "ties")
    assert "transformers" in finished.result["roles"]
    assert f"{quantization} (" in finished.out


def test_speculators_of_one_method_have_different_names(bench):
    """Two settings of a method are told apart; the same setting twice is refused."""
    other = NGRAM.replace("3", "2")
    result = bench("--no-peers", "--speculative-config", NGRAM, "--speculative-config", other).result
    assert list(result["roles"]) == ["plain", "ngram K=3", "ngram K=2"]
    assert bench("--speculative-config", NGRAM, "--speculative-config", NGRAM).code == 2


def test_kept_requests_are_warned_about(bench):
    """A speculator that remembers finished requests would copy its own earlier answers: the result says so."""
    config = SUFFIX.replace("}", ', "suffix_decoding_max_cached_requests": 4}')
    finished = bench("--no-peers", "--speculative-config", config)
    assert "suffix_decoding_max_cached_requests" in finished.result["warnings"][0]
    assert "warning" in finished.err


def test_threads_are_put_back(bench):
    """--threads holds for the benchmark only."""
    before = torch.get_num_threads()
    bench("--no-peers", "--threads", "2", "--speculative-config", NGRAM, "--kinds", "chat")
    assert torch.get_num_threads() == before


def test_progress_is_on_stderr(bench):
    """The bar names its phases on stderr and leaves stdout alone."""
    finished = bench("--no-peers", "--progress", "--speculative-config", NGRAM, "--kinds", "chat")
    assert "steps of ngram" in finished.err
    assert finished.result["benchmark"] == "specround bench"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--kinds", "poetry"), "poetry"),
        (("--kinds", ","), "kinds"),
        (("--repeats", "0"), "repeats=0"),
        (("--prompts", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
        (("--output", "/no/such/directory/out.json"), "--output"),
        (("--setting", "check_values"), "NAME=JSON"),
        (("--setting", "nonsense=1"), "nonsense"),
        (("--setting", "max_num_seqs=1"), "max_num_seqs"),
        (("--speculative-config", '{"method": "nonsense"}'), "nonsense"),
    ],
)
def test_usage_errors(bench, arguments, names):
    """A wrong argument is exit code 2 and one line that names it."""
    finished = bench("--no-peers", *arguments)
    assert (finished.code, finished.out, len(finished.err.splitlines())) == (2, "", 1)
    assert names in finished.err
