"""Text grows without half characters; stop strings are found wherever they fall."""

from __future__ import annotations

from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from moedraft.engine.detokenizer import Detokenizer

from byte_fallback import WORDS, byte_fallback, spelt


class ByteTokenizer:
    """A token is a byte."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_multi_byte_characters_appear_whole() -> None:
    text = "naïve 日本語 🙂!"
    detokenizer = Detokenizer(ByteTokenizer())
    for byte in text.encode():
        detokenizer.add([byte])
        assert "\ufffd" not in detokenizer.text
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    detokenizer.add(list("ab🙂".encode())[:-1])
    assert detokenizer.text == "ab"
    detokenizer.flush()
    assert detokenizer.text == "ab\ufffd"
    detokenizer.flush()
    assert detokenizer.text == "ab\ufffd"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_stop_strings_across_tokens_and_rounds(size: int) -> None:
    text = "SELECT name FROM t; -- done; more"
    detokenizer = Detokenizer(ByteTokenizer(), ("; --", "done"))
    data, taken = list(text.encode()), 0
    for start in range(0, len(data), size):
        stopped = detokenizer.add(data[start : start + size])
        if stopped is not None:
            taken = start + stopped
            break
    assert detokenizer.text == "SELECT name FROM t"
    assert taken == text.index("; --") + 4


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """By definition: the longest end of `text` that begins one of `stops`."""
    sizes = [0]
    for stop in stops:
        sizes += [size for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_back_is_found_as_the_text_grows(seed: int) -> None:
    random = Random(seed)
    stops = tuple("".join(random.choices("ab", k=random.randint(1, 6))) + "c" for _ in range(3))
    detokenizer = Detokenizer(ByteTokenizer(), stops)
    while detokenizer.add([random.choice(b"aabb")]) is None and len(detokenizer.text) < 60:
        text = detokenizer.text
        assert len(text) - detokenizer.settled() == held_back(text, stops)


def test_long_stop_strings_cost_a_step_no_more_than_short_ones() -> None:
    """None is compared with the text again."""

    class Watched(str):
        looks = 0

        def startswith(self, *_: object) -> bool:  # type: ignore[override]
            Watched.looks += 1
            return False

    detokenizer = Detokenizer(ByteTokenizer(), tuple(Watched("a" * 999 + end) for end in "wxyz"))
    detokenizer.add(list(b"ab" * 600))
    detokenizer.settled()
    assert Watched.looks == 0


def test_settled_holds_back_what_may_become_a_stop() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ("STOP",))
    detokenizer.add(list(b"go ST"))
    assert detokenizer.text[: detokenizer.settled()] == "go "
    detokenizer.add(list(b"AR"))
    assert detokenizer.settled() == len("go STAR")


def test_no_stop_is_found_twice_or_before_its_time() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ("aa",))
    assert detokenizer.add(list(b"xa")) is None
    assert detokenizer.add(list(b"bab")) is None
    assert detokenizer.add(list(b"aab")) == 2
    assert detokenizer.text == "xabab"


class PieceTokenizer:
    """A token is a piece of bytes."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: object) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_stop_is_at_the_same_token_however_the_blocks_end(size: int) -> None:
    """A block that ends in half a character must not put the stop string off."""
    tokenizer = PieceTokenizer(b"ab ", b"STOP", "🙂".encode()[:2], "🙂".encode()[2:])
    detokenizer, ids, taken = Detokenizer(tokenizer, ("STOP",)), [0, 1, 2, 3], 0
    for start in range(0, len(ids), size):
        stopped = detokenizer.add(ids[start : start + size])
        if stopped is not None:
            taken = start + stopped
            break
    assert (taken, detokenizer.text) == (2, "ab ")


def test_a_held_back_stop_string_is_never_shown() -> None:
    half = "🙂".encode()[:2]
    detokenizer = Detokenizer(PieceTokenizer(b"ab ", b"STOP" + half), ("STOP",))
    assert detokenizer.add([0, 1]) == 2
    assert detokenizer.text == "ab "
    detokenizer = Detokenizer(PieceTokenizer(b"ab ", half), ("\ufffd",))
    assert detokenizer.add([0, 1]) is None
    assert detokenizer.flush()
    assert detokenizer.text == "ab "


# -- a tokenizer that spells what it does not know in bytes, and words with their space -------------


@pytest.fixture(scope="module")
def llama() -> PreTrainedTokenizerFast:
    return byte_fallback()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_many_characters_of_bytes_in_a_row(llama: PreTrainedTokenizerFast, size: int) -> None:
    ids = spelt("a", "🇩🇪🇯🇵🙂🙂🙂日本語", "▁the", "🙂", "x")
    detokenizer = Detokenizer(llama)
    for start in range(0, len(ids), size):
        detokenizer.add(ids[start : start + size])
        assert "\ufffd" not in detokenizer.text
        known = llama.decode(ids[: start + size]).rstrip("\ufffd")
        assert detokenizer.text.startswith(known)  # whole characters are not held back
    detokenizer.flush()
    assert detokenizer.text == llama.decode(ids) == "a🇩🇪🇯🇵🙂🙂🙂日本語 the🙂x"


def test_any_text_in_any_blocks_is_the_whole_text(llama: PreTrainedTokenizerFast) -> None:
    random = Random(0)
    for _ in range(200):
        ids = spelt(*random.choices([*WORDS[3:], "é", "日", "🙂", "\n", "q"], k=random.randint(1, 30)))
        detokenizer, at = Detokenizer(llama), 0
        while at < len(ids):
            size = random.randint(1, 9)
            detokenizer.add(ids[at : at + size])
            at += size
        detokenizer.flush()
        assert detokenizer.text == llama.decode(ids)


def test_a_broken_byte_breaks_nothing_else(llama: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(llama)
    for token in spelt("🙂é", b"\xff", "▁the", "🙂", b"\xe6"):
        detokenizer.add([token])
    assert detokenizer.text == "🙂é\ufffd the🙂"
    detokenizer.flush()
    assert detokenizer.text == "🙂é\ufffd the🙂\ufffd"


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ((), ("▁time", "▁the"), "time the"),
        (("<s>",), ("▁time",), "time"),
        (("<s>", "▁a"), ("▁time", "▁the"), " time the"),
        (("a", "🙂🙂🙂🙂"), ("🙂", "▁the"), "🙂 the"),  # the window begins within a character
        (("x", b"\xe6\x97"), ("▁the",), "the"),  # ends within one
        (("x" * 40,), ("x",), "x"),
    ],
)
def test_the_text_goes_on_where_the_prompt_ends(
    llama: PreTrainedTokenizerFast, prompt: tuple[str, ...], answer: tuple[str, ...], text: str
) -> None:
    detokenizer = Detokenizer(llama, prompt=spelt(*prompt))
    for token in spelt(*answer):
        detokenizer.add([token])
    detokenizer.flush()
    assert detokenizer.text == text


def test_a_stop_string_may_begin_with_the_first_space(llama: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(llama, (" time",), spelt("▁a"))
    assert detokenizer.add(spelt("▁time", "▁the")) == 1
    assert detokenizer.text == ""
