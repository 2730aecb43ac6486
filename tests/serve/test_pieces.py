"""Single tokens and log-probabilities as clients see them, where tokens are parts of characters."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moedraft.core import RequestOutput, SamplingParams, Sequence, TokenLogprobs
from moedraft.engine.commit import output_of
from moedraft.serve.http.plan import GenerationPlan
from moedraft.serve.http.prompts import Piece, PromptPreparer
from moedraft.serve.http.replies import ChatReply, Reply

from byte_fallback import byte_fallback, spelt

MINI = Path(__file__).parents[2] / "data" / "models" / "mini-target"
TEXT = " naïve 日本語🙂 x"


@pytest.fixture(scope="module")
def mini() -> Any:
    return AutoTokenizer.from_pretrained(MINI)


def test_pieces_of_a_byte_level_vocabulary(mini: Any) -> None:
    prompts = PromptPreparer(mini, None)
    pieces = [prompts.piece(token) for token in mini(TEXT, add_special_tokens=False)["input_ids"]]
    assert b"".join(piece.data for piece in pieces).decode() == TEXT
    assert any(piece.text.startswith("bytes:\\x") for piece in pieces)
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert prompts.piece(mini.eos_token_id) == Piece(mini.eos_token.encode(), False)


def test_pieces_of_a_vocabulary_with_single_bytes() -> None:
    prompts = PromptPreparer(byte_fallback(), None)
    pieces = [prompts.piece(token) for token in spelt("<s>", "▁the", "é", "▁", "x")]
    assert [piece.text for piece in pieces] == ["<s>", " the", "bytes:\\xc3", "bytes:\\xa9", " ", "x"]
    assert [piece.shown for piece in pieces] == [False, *[True] * 5]


def test_pieces_that_only_the_tokenizer_knows() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f"{ids[0]} "

    assert PromptPreparer(Tokenizer(), None).piece(7) == Piece(b"7 ")


def test_a_token_beyond_the_vocabulary_is_spelt_somehow(mini: Any) -> None:
    assert PromptPreparer(mini, None).piece(10**6) == Piece(b"")


def plan(**fields: Any) -> GenerationPlan:
    plain = GenerationPlan("m", None, ["x"], 1, SamplingParams(logprobs=2), True, False, False, False)
    return replace(plain, **fields)


def said(text: str, token_ids: list[int], top: list[tuple[tuple[int, float], ...]]) -> RequestOutput:
    logprobs = [TokenLogprobs(-1.0 - i, one) for i, one in enumerate(top)]
    row = Sequence("r", [1, *token_ids], 1, SamplingParams(), 0)
    return replace(output_of(row, text, now=0.0), text=text, finish_reason="length", logprobs=logprobs)


def test_offsets_count_letters_of_the_text() -> None:
    ids = spelt("▁the", "é", "▁a", "🙂", "</s>")
    reply = Reply(plan(), PromptPreparer(byte_fallback(), None).piece)
    told = reply.whole([said(" theé a🙂", ids, [()] * len(ids))])["choices"][0]["logprobs"]
    assert told["text_offset"] == [0, 4, 4, 5, 7, 7, 7, 7, 8]
    assert told["tokens"][-1] == "</s>"


def test_offsets_of_a_stream_go_on() -> None:
    ids = spelt("▁the", "é", "▁a")
    reply = Reply(plan(), PromptPreparer(byte_fallback(), None).piece)
    pieces = [reply.piece(0, said("", ids[:count], [()] * count)) for count in (2, 3, 4)]
    assert [piece["choices"][0]["logprobs"]["text_offset"] for piece in pieces] == [[0, 4], [4], [5]]


def test_the_token_itself_is_among_the_likeliest_whatever_its_place() -> None:
    the, a, x = spelt("▁the", "▁a", "x")
    reply = Reply(plan(), PromptPreparer(byte_fallback(), None).piece)
    output = said(" the x", [the, x], [((the, -1.0), (a, -1.5)), ((a, -0.5), (the, -1.2))])
    told = reply.whole([output])["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{" the": -1.0, " a": -1.5}, {" a": -0.5, " the": -1.2, "x": -2.0}]
    output = said(" the", [the], [()])
    (alone,) = Reply(plan(), PromptPreparer(byte_fallback(), None).piece).whole([output])["choices"]
    assert alone["logprobs"]["top_logprobs"] == [{" the": -1.0}]


def test_parts_of_characters_do_not_take_each_other_s_place(mini: Any) -> None:
    first, second = mini("🙂", add_special_tokens=False)["input_ids"][:2]
    reply = Reply(plan(), PromptPreparer(mini, None).piece)
    told = reply.whole([said("", [first], [((first, -1.0), (second, -3.0))])])["choices"][0]["logprobs"]
    assert sorted(told["top_logprobs"][0].values()) == [-3.0, -1.0]
    assert told["top_logprobs"][0][told["tokens"][0]] == told["token_logprobs"][0]


def test_chat_gives_the_bytes_of_every_token() -> None:
    ids = spelt("▁the", "é")
    reply = ChatReply(plan(), PromptPreparer(byte_fallback(), None).piece)
    told = reply.whole([said(" theé", ids, [()] * 3)])["choices"][0]["logprobs"]["content"]
    assert bytes(byte for one in told for byte in one["bytes"]).decode() == " theé"


def test_the_most_letters_of_a_prompt_are_those_of_its_longest_tokens(mini: Any) -> None:
    longest = max(mini.get_vocab(), key=len)
    assert PromptPreparer(mini, 7)._most_letters == 7 * len(longest)
    assert PromptPreparer(mini, None)._most_letters == sys.maxsize
    for text in (mini.decode([mini.get_vocab()[longest]]) * 7, " " * 500, "a" * 500, TEXT * 9):
        assert len(text) <= len(mini(text, add_special_tokens=False)["input_ids"]) * len(longest)
