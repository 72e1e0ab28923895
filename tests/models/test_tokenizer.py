"""Text and chat messages to ids and back, from directories and from GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specround.contract.errors import ModelError, RequestError
from specround.models.chat_template import ChatTemplate
from specround.models.gguf import GgufModel
from specround.models.gguf_header import read_gguf_header
from specround.models.gguf_tokenizer import tokenizer_from_metadata
from specround.models.tokenizer import Tokenizer, tokenizer_from_directory
from tiny_models import CHAT_TEMPLATE, tiny_gguf, tiny_llama

TRICKY = [
    "",
    " ",
    "\n\n  \t x",
    "12345 and 3.14159, 007",
    "naïve café — ½ ① Ⅷ ٣٤٥ १२३",
    "日本語のテキスト 한국어 العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "def f(x):\n    return x  # don't\r\n",
    "a\u00a0b\u200bc\x00d\x7f",
    "It's I'LL they'Re",
    "trailing   ",
    "x" * 500,
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tokenizer"), with_tokenizer=True)


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    found = tokenizer_from_directory(directory, 280)
    assert found is not None
    return found


@pytest.mark.parametrize("text", TRICKY)
def test_smollm2_round_trips(smollm2_tokenizer: Tokenizer, text: str) -> None:
    """Every text comes back byte for byte: digits, Unicode, joiners, control characters and blanks."""
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


ASSIGNED = st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\x04\x06\x13\x14\x16\x1d")


@given(text=st.text(ASSIGNED, max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_round_trips(smollm2_tokenizer: Tokenizer, text: str) -> None:
    """Any text of assigned characters comes back, but for six control characters the vocabulary has no bytes for."""
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text), skip_special_tokens=False) == text


def test_smollm2_splits_digits(smollm2_tokenizer: Tokenizer) -> None:
    """Each ASCII digit is one token, which the pre-tokenizer chain without `Digits` would not give."""
    ids = smollm2_tokenizer.encode("12345")
    assert [smollm2_tokenizer.decode([token_id]) for token_id in ids] == list("12345")
    assert smollm2_tokenizer.convert_ids_to_tokens(smollm2_tokenizer.encode(" 42")) == ["Ġ", "4", "2"]


def test_smollm2_known_ids(smollm2_tokenizer: Tokenizer) -> None:
    """A few ids known from the published tokenizer, and its special tokens."""
    assert smollm2_tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert smollm2_tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert (smollm2_tokenizer.bos_token_id, smollm2_tokenizer.eos_token_ids) == (1, (2,))
    assert smollm2_tokenizer.special_ids == frozenset(range(17))
    assert smollm2_tokenizer.vocab_size == 49152


def test_smollm2_chat_template(smollm2_tokenizer: Tokenizer) -> None:
    """The chat format is the published one: a default system turn, one turn per message, an opened answer."""
    ids = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "Hi 12"}])
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_directory_and_gguf_agree(directory: Path, tmp_path: Path) -> None:
    """The same vocabulary read from `tokenizer.json` and from a GGUF file gives the same ids and chats."""
    stored = tokenizer_from_directory(directory, 280)
    read = GgufModel(tiny_gguf(tmp_path / "a.gguf", pre_tokenizer="gpt-2")).tokenizer(280)
    assert stored is not None
    for text in TRICKY:
        assert stored.encode(text) == read.encode(text)
        assert stored.decode(stored.encode(text)) == text
    chat = [{"role": "user", "content": "the 12"}]
    assert stored.apply_chat_template(chat) == read.apply_chat_template(chat)
    assert (stored.bos_token_id, stored.eos_token_ids) == (read.bos_token_id, read.eos_token_ids) == (1, (2,))
    assert stored.special_ids == read.special_ids == {0, 1, 2, 3}


def test_tokenizer_json_is_taken_as_it_stands(directory: Path, tmp_path: Path) -> None:
    """A class name in the configuration does not replace the pre-tokenizer of `tokenizer.json`."""
    content = json.loads((directory / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]],
    }
    content["model"]["vocab"]["12"] = content["model"]["vocab"].pop("<filler 279>")
    content["model"]["merges"].append(["1", "2"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    found = tokenizer_from_directory(tmp_path, 280)
    assert found is not None
    assert found.convert_ids_to_tokens(found.encode("12")) == ["1", "2"]


def test_older_formats_are_converted(directory: Path, tmp_path: Path) -> None:
    """Without `tokenizer.json`, vocabulary and merges are converted by transformers."""
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = tokenizer_from_directory(tmp_path, 280)
    assert found is not None
    assert found.decode(found.encode("the 12 é")) == "the 12 é"
    assert found.eos_token_ids == (2,)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """A tokenizer that needs the checkpoint's own code is refused, and the code has not run."""
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}})
    )
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n")
    with pytest.raises(ModelError, match=r"tokenizer"):
        tokenizer_from_directory(tmp_path, 10)
    assert not marker.exists()


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    """No tokenizer files means no tokenizer, not an error."""
    assert tokenizer_from_directory(tmp_path, 10) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0", "model": 3}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": "not in the vocabulary"}'),
        ("tokenizer_config.json", '{"chat_template": 3}'),
    ],
)
def test_corrupt_files_are_refused(directory: Path, tmp_path: Path, file: str, content: str) -> None:
    """A broken tokenizer file is a ModelError."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((directory / name).read_text())
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError):
        tokenizer_from_directory(tmp_path, 280)


def test_chat_templates_of_every_layout(directory: Path, tmp_path: Path) -> None:
    """A template file, an entry of the configuration, a named list and the older JSON file are all found, in order."""
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())

    def template() -> str | None:
        found = tokenizer_from_directory(tmp_path, 280)
        assert found is not None
        return found.chat_template

    assert template() is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
    assert template() == "older"
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert template() == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template() == "file"


def test_begin_and_end_tokens_of_a_gguf(tmp_path: Path) -> None:
    """A file that asks for a begin and an end token gets them around a text, and not inside a chat."""
    metadata = dict(read_gguf_header(tiny_gguf(tmp_path / "a.gguf")).metadata)
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    found = tokenizer_from_metadata(metadata, 280)
    plain = found.encode("the", add_special_tokens=False)
    assert found.encode("the") == [1, *plain, 2]
    assert found.decode(found.encode("the")) == "the"


def test_decode_refuses_ids_out_of_range(tokenizer: Tokenizer) -> None:
    """Ids below 0, above the vocabulary or of another type are refused with their position."""
    for wrong in (-1, 280, 10**12, "1", None, 1.0):
        with pytest.raises(RequestError, match=r"token_ids\[1\]"):
            tokenizer.decode([5, wrong])  # type: ignore[list-item]
        with pytest.raises(RequestError, match=r"token_ids\[0\]"):
            tokenizer.convert_ids_to_tokens([wrong])  # type: ignore[list-item]


def test_padding_rows_of_the_embedding_decode_to_nothing(directory: Path) -> None:
    """An id that only the model's padded embedding has is allowed and has no text."""
    padded = tokenizer_from_directory(directory, 320)
    assert padded is not None
    assert padded.vocab_size == 320
    assert padded.decode([*padded.encode("the"), 300]) == "the"
    assert padded.convert_ids_to_tokens([300]) == [None]


def test_special_tokens_are_left_out_by_default(tokenizer: Tokenizer) -> None:
    """Special tokens written in a text become their ids and are dropped by `decode` unless kept."""
    ids = tokenizer.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"


@pytest.mark.parametrize("text", ["\ud800", None, 3, ["a"], b"a"])
def test_encode_refuses_what_is_not_text(tokenizer: Tokenizer, text: object) -> None:
    """Lone surrogates and other types are a RequestError."""
    with pytest.raises(RequestError, match="prompt="):
        tokenizer.encode(text)  # type: ignore[arg-type]


def test_model_without_template(directory: Path, tmp_path: Path) -> None:
    """A chat with a model that has no template is a RequestError that says so."""
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    plain = tokenizer_from_directory(tmp_path, 280)
    assert plain is not None
    with pytest.raises(RequestError, match="no chat template"):
        plain.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "messages", [[], ["x"], [{"content": "x"}], [{"role": 3}], [{"role": "user", "content": None}]]
)
def test_malformed_messages(tokenizer: Tokenizer, messages: list[dict[str, object]]) -> None:
    """Malformed messages are a RequestError, whether the check or the template finds them."""
    with pytest.raises(RequestError, match="messages"):
        tokenizer.apply_chat_template(messages)


def render(source: str, **variables: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render([{"role": "user", "content": "<é>"}], add_generation_prompt=True, variables=variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content | tojson }}", '<s>"<é>"'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}y", "y"),
        ("{% for m in messages %}\n  {% generation %}{{ m.role }}{% endgeneration %}\n{% endfor %}", "user"),
        ("{{ tools is none }} {{ enable_thinking }}", "True False"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_what_templates_may_use(source: str, expected: str) -> None:
    """Plain JSON, loop controls, generation marks, extra variables, dates and namespaces work as in transformers."""
    assert render(source, enable_thinking=False) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].missing.deeper }}",
    ],
)
def test_templates_that_fail_or_reach_out(source: str) -> None:
    """A template that refuses, is broken, reaches for Python's internals or changes its input is a RequestError."""
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_the_tiny_template_is_valid() -> None:
    """The suite's own template renders the way its tests assume."""
    template = ChatTemplate(CHAT_TEMPLATE, {})
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render(chat, add_generation_prompt=False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
