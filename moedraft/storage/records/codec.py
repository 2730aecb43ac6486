"""The bytes of a replay record: token ids as int32, log-probabilities as float16, behind a checked header.

Layout of format 1, little-endian: header, then token_ids [n] i4, rejected [m] i4, topk_ids [a, k] i4,
topk_logprobs [a, k] f2. Knows no database.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any, NamedTuple, cast

import numpy as np

from moedraft.core import InvalidRequest, ReplayRecord

FORMAT = 1
HEADER = struct.Struct("<BxHIIII")  # format, k, len(token_ids), len(answer), len(rejected), crc32 of the rest
ROUNDING = 1e-6  # by which a share may be above 1
LOWEST = float(np.finfo(np.float16).min)  # lower log-probabilities become this, so that they stay finite

Array = np.ndarray[Any, np.dtype[Any]]


class Payload(NamedTuple):
    token_ids: list[int]
    rejected: list[int]
    topk_ids: list[list[int]]  # [answer, k]
    topk_logprobs: list[list[float]]  # [answer, k]


def shares_of(text: str | None) -> dict[str, float]:
    """How the drafts stood, 0 to 1 by name, as `json.dumps` wrote it; {} for None and for anything else."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError, TypeError):  # RecursionError: nested too deeply; TypeError: no text
        return {}
    sound = isinstance(found, dict) and all(_is_share(value) for value in found.values())
    return found if sound else {}


def _is_share(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= cast(float, value) <= 1 + ROUNDING  # false for NaN


class DamagedPayload(Exception):
    """The bytes were not written by this module, or have changed since."""


def encode(record: ReplayRecord) -> bytes:
    """The record's payload. Raises InvalidRequest for shapes that do not fit and log-probabilities of NaN."""
    if record.num_prompt_tokens < 1:
        raise InvalidRequest("a replay record needs a prompt of at least one token.")
    answer = len(record.token_ids) - record.num_prompt_tokens
    ids = _matrix(record.topk_ids, answer, "i4")
    logprobs = _matrix(record.topk_logprobs, answer, "f4")
    if ids.shape != logprobs.shape or np.isnan(logprobs).any():
        raise InvalidRequest("a replay record needs one log-probability that is a number per top-k id.")
    halves = np.where(np.isneginf(logprobs), logprobs, np.maximum(logprobs, LOWEST)).astype("<f2")
    tokens, rejected = np.asarray(record.token_ids, "<i4"), np.asarray(record.rejected, "<i4")
    body = b"".join(part.tobytes() for part in (tokens, rejected, ids, halves))
    head = (FORMAT, ids.shape[1], len(tokens), answer, len(rejected), zlib.crc32(body))
    return HEADER.pack(*head) + body


def decode(payload: bytes, num_prompt_tokens: int) -> Payload:
    """The inverse of `encode`, with log-probabilities in float16 precision. Raises DamagedPayload."""
    body, k, n_tokens, answer, n_rejected = _checked(payload, num_prompt_tokens)
    tokens, rejected, ids = np.split(
        np.frombuffer(body, "<i4", n_tokens + n_rejected + answer * k), [n_tokens, n_tokens + n_rejected]
    )
    logprobs = np.frombuffer(body, "<f2", offset=len(body) - 2 * answer * k)
    return Payload(
        tokens.tolist(),
        rejected.tolist(),
        ids.reshape(answer, k).tolist(),
        logprobs.reshape(answer, k).tolist(),
    )


def answer_in(payload: bytes, num_prompt_tokens: int) -> Array:
    """The answer's token ids alone, int32 [answer], in a fraction of the time. Raises DamagedPayload."""
    body, _, n_tokens, *_ = _checked(payload, num_prompt_tokens)
    return np.frombuffer(body, "<i4", n_tokens)[num_prompt_tokens:]


def _checked(payload: bytes, num_prompt_tokens: int) -> tuple[bytes, int, int, int, int]:
    """The body, and k, tokens, answer and rejected as in the header. Raises DamagedPayload.

    `num_prompt_tokens` is stored beside the payload; the checksum does not cover it.
    """
    if len(payload) < HEADER.size:
        raise DamagedPayload("it is too short")
    version, k, n_tokens, answer, n_rejected, checksum = HEADER.unpack_from(payload)
    body = payload[HEADER.size :]
    if version != FORMAT:
        raise DamagedPayload(f"format {version} is unknown")
    if len(body) != 4 * (n_tokens + n_rejected) + 6 * answer * k or zlib.crc32(body) != checksum:
        raise DamagedPayload("its bytes have changed")
    if not 1 <= num_prompt_tokens == n_tokens - answer:
        raise DamagedPayload(f"it has no room for a prompt of {num_prompt_tokens} tokens")
    return body, k, n_tokens, answer, n_rejected


def _matrix(rows: list[list[Any]], answer: int, kind: str) -> Array:
    """`rows` as little-endian [answer, k]."""
    widths = {len(row) for row in rows}
    if len(rows) != answer or len(widths) > 1:
        raise InvalidRequest(f"a replay record needs equally long top-k rows for its {answer} answer tokens.")
    return np.array(rows, "<" + kind).reshape(answer, widths.pop() if widths else 0)
