"""Models written as Hugging Face directories."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from specround.cli import main
from specround.contract import ModelError
from specround.models.export import export_model
from specround.models.pretrained import load_pretrained
from specround.models.sources import resolve_model
from tiny_models import tiny_gguf, tiny_llama


def load(model):
    return load_pretrained(resolve_model(str(model)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "write", [tiny_gguf, lambda path: tiny_llama(path, with_tokenizer=True)], ids=["gguf", "llama"]
)
def test_an_exported_model_is_the_same_model(tmp_path, write):
    """Weights, end tokens, tokenizer and chat template come back, in transformers' tokenizer too."""
    model = tmp_path / "model.gguf"
    write(model)
    export_model(str(model), tmp_path / "exported")
    before, after = load(model), load(tmp_path / "exported")
    weights = dict(before.module.named_parameters())
    assert weights.keys() == dict(after.module.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in after.module.named_parameters())
    assert after.eos_token_ids == before.eos_token_ids != ()
    text, messages = "Hello, world! é", [{"role": "user", "content": "Hi"}]
    ids = before.tokenizer.encode(text)
    assert after.tokenizer.encode(text) == ids
    assert after.tokenizer.chat_template == before.tokenizer.chat_template is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert theirs.encode(text) == ids
    assert theirs.apply_chat_template(messages, tokenize=False) == before.tokenizer.render_chat(messages, False)


def test_export_overwrites_nothing(tmp_path, capsys):
    """A directory that holds something is refused before the model is read, with exit code 2."""
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ModelError, match=r"DIRECTORY=.*must be a directory that is empty"):
        export_model("nothing", tmp_path)
    assert main(["export", "nothing", str(tmp_path)]) == 2
    assert "must be a directory that is empty" in capsys.readouterr().err


def test_export_from_the_command_line(tmp_path, capsys):
    """`specround export` writes the type of weights that is asked for, and prints where."""
    model = tiny_llama(tmp_path / "model")
    assert main(["export", str(model), str(tmp_path / "low"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'low'}\n", "")
    assert json.loads((tmp_path / "low/config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "low/tokenizer.json").exists()
