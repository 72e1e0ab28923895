"""Text that grows token by token is the text of all tokens, also where characters are split over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reference import PlainReference

from specround.engine.detokenizer import Detokenizer
from specround.models.tokenizer import Tokenizer

TEXTS = ["naïve café", "日本語テキスト", "👍🏽 ok 👨‍👩‍👧", "Ωμέγα", "\u0301\u0301", "mixed 中 a é 😀"]


@pytest.fixture(scope="module")
def tokenizer(speaking: PlainReference) -> Tokenizer:
    """Byte-level: every character beyond ASCII is split over several tokens."""
    assert speaking.plain.tokenizer is not None
    return speaking.plain.tokenizer


def feed_all(detokenizer: Detokenizer, tokens: list[int]) -> str | None:
    """Feed until a stop string is found."""
    settled = ""
    for token in tokens:
        stop = detokenizer.feed(token)
        if stop is not None:
            return stop
        assert detokenizer.settled_text.startswith(settled), "settled text was taken back"
        settled = detokenizer.settled_text
    return detokenizer.finish()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 279), max_size=40), st.lists(st.integers(4, 127), max_size=10), st.booleans())
def test_random_tokens(tokenizer: Tokenizer, tokens: list[int], prompt: list[int], skip: bool) -> None:
    """Any token sequence, whole characters or not, special tokens included."""
    prompt = tokenizer.encode(tokenizer.decode(prompt).replace("\N{REPLACEMENT CHARACTER}", ""))
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    assert feed_all(detokenizer, tokens) is None
    assert detokenizer.text == tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20) | st.sampled_from(TEXTS), st.text(max_size=8))
def test_random_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    """Any text comes back whole, and every prefix shown on the way is a prefix of it."""
    text = text.replace("<|", "")
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt.replace("<|", "")))
    for token in tokenizer.encode(text):
        detokenizer.feed(token)
        assert text.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == text


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="abcé😀 ", min_size=1, max_size=24),
    st.lists(st.text(alphabet="abcé😀 ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stops: list[str], include: bool) -> None:
    """The stop string that is complete first ends the text; among those complete at once, the one that began first."""
    detokenizer = Detokenizer(tokenizer, (), stop=stops, include_stop=include)
    found = feed_all(detokenizer, tokenizer.encode(text))
    tokens = tokenizer.encode(text)
    expected: tuple[str, int] | None = None
    for count in range(1, len(tokens) + 1):
        shown = tokenizer.decode(tokens[:count])
        if shown.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        places = [(shown.find(stop), -len(stop), stop) for stop in stops if stop in shown]
        if places:
            expected = (min(places)[2], min(places)[0])
            break
    if expected is None:
        assert (found, detokenizer.text) == (None, text)
    else:
        stop, place = expected
        assert found == stop
        assert detokenizer.text == text[: place + len(stop) if include else place]


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    """A text that ends inside a character shows a replacement character, once, and only at the end."""
    tokens = tokenizer.encode("a😀")[:-1]
    detokenizer = Detokenizer(tokenizer, ())
    for token in tokens:
        detokenizer.feed(token)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("stops", "found", "text"),
    [(["he", "t"], "t", "a "), (["th", "the"], "the", "a "), (["e", "he"], "he", "a t")],
)
def test_one_token_completes_several_stop_strings(
    stops: list[str], found: str, text: str, tokenizer: Tokenizer
) -> None:
    """Of the stop strings within one token the one that begins first wins, then the longest."""
    tokens = tokenizer.encode("a the")
    assert len(tokenizer.decode(tokens[-1:]).strip()) == 3, "the word was meant to be one token"
    detokenizer = Detokenizer(tokenizer, (), stop=stops)
    assert (feed_all(detokenizer, tokens), detokenizer.text) == (found, text)
