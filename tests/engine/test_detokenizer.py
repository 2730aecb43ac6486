"""Text grows without half characters; stop strings are found wherever they fall."""

from __future__ import annotations

import pytest

from moedraft.engine.detokenizer import Detokenizer


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
    assert detokenizer.text == ""
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
