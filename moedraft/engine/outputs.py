"""What leaves the engine of a sequence, and the counts behind it."""

from __future__ import annotations

import time
from itertools import zip_longest

from moedraft.core import FinishReason, RequestOutput, Sequence
from moedraft.engine.decoder import Round


def cut(
    row: Sequence, tokens: list[int], max_model_len: int, eos_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the end of the answer, and why it ends there, if it does."""
    room = min(row.params.max_tokens - row.num_generated, max_model_len - len(row.token_ids))
    for index, token in enumerate(tokens[:room]):
        if token in eos_token_ids and not row.params.ignore_eos:
            return tokens[: index + 1], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None


def count_round(row: Sequence, one: Round, entered: int) -> None:
    """The row's statistics. Only the first `entered` of the round's tokens became part of the answer."""
    row.num_steps += 1
    accepted = min(one.accepted, entered)
    if one.match is not None:
        row.looked_up += len(one.match.tokens)
        row.lookup_accepted += accepted
    elif one.confidences:
        _count_drafted(row, len(one.confidences), accepted)


def _count_drafted(row: Sequence, drafted: int, accepted: int) -> None:
    """One verification of `drafted` tokens, of which the first `accepted` became part of the answer."""
    row.num_drafts += 1
    row.drafted += drafted
    row.accepted += accepted
    row.drafted_at = _plus_one(row.drafted_at, drafted)
    row.accepted_at = _plus_one(row.accepted_at, accepted)


def _plus_one(counts: list[int], first: int) -> list[int]:
    """`counts` with one more at each of the first `first` positions."""
    return [before + more for before, more in zip_longest(counts, [1] * first, fillvalue=0)]


def output_of(row: Sequence, delta: str) -> RequestOutput:
    """The answer as it stands; `delta` is the text that is new."""
    first = row.first_token_at
    return RequestOutput(
        request_id=row.request_id,
        prompt=row.prompt,
        text=row.text,
        token_ids=row.generated,
        finish_reason=row.finish_reason,
        expert=row.expert,
        adapter_version=row.adapter_version,
        num_drafts=row.num_drafts,
        num_draft_tokens=row.drafted,
        num_accepted_tokens=row.accepted,
        num_rejections=len(row.rejected),
        mean_acceptance_length=1 + row.accepted / row.num_drafts if row.num_drafts else None,
        seconds=(row.finished_at or time.monotonic()) - row.arrived_at,
        delta=delta,
        num_prompt_tokens=row.num_prompt_tokens,
        confidence=row.confidence,
        time_to_first_token=None if first is None else first - row.arrived_at,
        drafted_at=list(row.drafted_at),
        accepted_at=list(row.accepted_at),
        num_steps=row.num_steps,
        num_lookup_tokens=row.looked_up,
        num_accepted_lookup_tokens=row.lookup_accepted,
        logprobs=list(row.logprobs) if row.params.logprobs is not None else None,
    )
