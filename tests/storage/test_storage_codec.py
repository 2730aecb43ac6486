from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_fakes import record

from moedraft.core import InvalidRequest
from moedraft.storage.records.codec import HEADER, DamagedPayload, answer_in, decode, encode

tokens = st.integers(0, 2**31 - 1)


def test_ids_come_back_exactly() -> None:
    found = decode(encode(record()), 2)
    assert found.token_ids == record().token_ids
    assert found.topk_ids == record().topk_ids
    assert found.rejected == record().rejected
    assert found.topk_logprobs == record().topk_logprobs  # these are float16 numbers already


@settings(deadline=None)  # it is about what comes back, whatever else the machine does
@given(st.lists(tokens, min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 4), st.data())
def test_any_shape_comes_back(prompt: list[int], answer: int, k: int, data: st.DataObject) -> None:
    def matrix(values: st.SearchStrategy[float]) -> list[list[float]]:
        rows = st.lists(st.lists(values, min_size=k, max_size=k), min_size=answer, max_size=answer)
        return data.draw(rows)

    ids, logprobs = matrix(tokens), matrix(st.floats(-60000, 0, width=32))
    generated = data.draw(st.lists(tokens, min_size=answer, max_size=answer))
    shape = {"token_ids": prompt + generated, "num_prompt_tokens": len(prompt), "rejected": []}
    found = decode(encode(record(**shape, topk_ids=ids, topk_logprobs=logprobs)), len(prompt))
    assert (found.token_ids, found.topk_ids) == (prompt + generated, ids)
    assert (
        answer_in(encode(record(**shape, topk_ids=ids, topk_logprobs=logprobs)), len(prompt)).tolist()
        == generated
    )
    np.testing.assert_allclose(found.topk_logprobs, logprobs, rtol=2**-11, atol=2**-24)


def test_extreme_logprobs_are_clipped() -> None:
    low = [[-1e9, -math.inf], [-7e4, -1e-9], [0.0, -3e38]]
    found = decode(encode(record(topk_logprobs=low)), 2).topk_logprobs
    assert found == [[-65504.0, -math.inf], [-65504.0, 0.0], [0.0, -65504.0]]


def test_a_usual_record_is_small() -> None:
    draw = random.Random(0)
    ids = [[draw.randrange(150_000) for _ in range(16)] for _ in range(64)]
    logprobs = [[-9 * draw.random() for _ in range(16)] for _ in range(64)]
    usual = record(token_ids=list(range(128)), num_prompt_tokens=64, topk_ids=ids, topk_logprobs=logprobs)
    assert len(encode(usual)) < 6_800


@pytest.mark.parametrize(
    "changes",
    [
        {"topk_ids": [[1, 2], [3, 4]]},
        {"topk_ids": [[1, 2], [3, 4], [5]]},
        {"topk_ids": [[1], [2], [3]]},
        {"topk_logprobs": [[-1.0, -1.0], [-1.0, math.nan], [-1.0, -1.0]]},
        {"num_prompt_tokens": 6},
        {"num_prompt_tokens": 0, "topk_ids": [[1]] * 5, "topk_logprobs": [[-1.0]] * 5},
    ],
)
def test_unequal_shapes_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="a replay record needs"):
        encode(record(**changes))


def test_every_flipped_bit_is_seen() -> None:
    good = encode(record())
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 4
        if position == 1:
            continue  # the header's pad byte carries nothing
        for read in (decode, answer_in):
            with pytest.raises(DamagedPayload):
                read(bytes(bad), 2)


@pytest.mark.parametrize("length", [0, 5, HEADER.size, HEADER.size + 1])
def test_a_cut_record_is_damage(length: int) -> None:
    with pytest.raises(DamagedPayload):
        decode(encode(record())[:length], 2)


def test_an_unknown_format_is_damage() -> None:
    with pytest.raises(DamagedPayload, match="format 2 is unknown"):
        decode(b"\x02" + encode(record())[1:], 2)


@pytest.mark.parametrize("prompt", [-1, 0, 1, 3, 5, 2**40])
def test_a_wrong_prompt_length_is_damage(prompt: int) -> None:
    with pytest.raises(DamagedPayload, match=f"a prompt of {prompt} tokens"):
        decode(encode(record()), prompt)


def test_an_impossible_answer_length_is_damage() -> None:
    """Its rows are empty, so the length of the bytes says nothing: they would fill the memory."""
    empty = encode(record(topk_ids=[[]] * 3, topk_logprobs=[[]] * 3))
    version, k, n_tokens, _, n_rejected, checksum = HEADER.unpack_from(empty)
    bad = HEADER.pack(version, k, n_tokens, 2**32 - 1, n_rejected, checksum) + empty[HEADER.size :]
    with pytest.raises(DamagedPayload):
        decode(bad, n_tokens - (2**32 - 1))
