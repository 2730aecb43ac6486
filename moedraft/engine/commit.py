"""What verification emitted enters a sequence: tokens, text, counts, and the end of the answer."""

from __future__ import annotations

from copy import copy
from itertools import zip_longest

from moedraft.core import SHARED, FinishReason, RequestOutput, Sequence
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.engine.detokenizer import Detokenizer
from moedraft.evidence import NOBODY, Evidence
from moedraft.speculation import SpeculationStats

LOOKED_UP = (LookupDrafter.source, LookupDrafter.earlier)


def commit(
    evidence: Evidence, b: int, text: Detokenizer, max_model_len: int, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Take row b's verified tokens into its sequence and its text; say why the answer ends, if it does."""
    row = evidence.rows[b]
    if evidence.broken[b]:
        count_round(evidence, b, 0)
        keep_for_learning(evidence, b, 0)
        return "error"
    tokens, reason = cut(row, evidence.tokens[b], max_model_len, eos_token_ids)
    stopped = text.add(tokens[:-1] if reason == "stop" else tokens)  # the EOS token is not part of the text
    if stopped is not None:
        tokens, reason = tokens[:stopped], "stop"
    count_round(evidence, b, len(tokens))
    keep_for_learning(evidence, b, len(tokens))
    row.target_cached = len(row.token_ids) + evidence.accepted[b]
    row.logprobs += evidence.logprobs(b)[: len(tokens)]
    row.token_ids += tokens
    return reason


def cut(
    row: Sequence, tokens: list[int], max_model_len: int, eos_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """The tokens that belong to the answer, and why it ends with them, if it does."""
    room = min(row.params.max_tokens - row.num_generated, max_model_len - len(row.token_ids))
    for index, token in enumerate(tokens[:room]):
        if token in eos_token_ids and not row.params.ignore_eos:
            return tokens[: index + 1], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None


def count_round(evidence: Evidence, b: int, entered: int) -> None:
    """Add this round to row b's statistics. Only the first `entered` of its tokens are in the answer."""
    row, proposal = evidence.rows[b], evidence.proposal
    drafted, accepted, source = proposal.lengths[b], min(evidence.accepted[b], entered), proposal.sources[b]
    stats = row.speculation
    stats.num_steps += 1
    if source in LOOKED_UP:
        stats.num_lookup_tokens += drafted
        stats.num_accepted_lookup_tokens += accepted
        if source == LookupDrafter.earlier:
            stats.num_earlier_tokens += drafted
            stats.num_accepted_earlier_tokens += accepted
    elif source != NOBODY:
        count_drafted(stats, drafted, accepted)
        if proposal.experts[b] == SHARED:
            count_shared(stats, drafted, accepted)


def keep_for_learning(evidence: Evidence, b: int, entered: int) -> None:
    """Keep with row b what its replay record will say of this round; its tokens have not entered it yet.

    That is the target's likeliest tokens, where the draft model was refused, and which version of the row's
    expert drafted.
    """
    row, proposal = evidence.rows[b], evidence.proposal
    if (top := evidence.topk.get(b)) is not None:
        row.captured.append(top)
    if proposal.sources[b] in (NOBODY, *LOOKED_UP):
        return
    if proposal.experts[b] == row.domain:
        row.adapter_version = proposal.versions[b]
    if evidence.accepted[b] < min(entered, proposal.lengths[b]):
        row.rejected.append(row.num_generated + evidence.accepted[b])


def count_drafted(stats: SpeculationStats, drafted: int, accepted: int) -> None:
    """Count one verification of `drafted` tokens, of which the first `accepted` are in the answer."""
    stats.num_drafts += 1
    stats.num_draft_tokens += drafted
    stats.num_accepted_tokens += accepted
    stats.drafted_at = _plus_one(stats.drafted_at, drafted)
    stats.accepted_at = _plus_one(stats.accepted_at, accepted)


def count_shared(stats: SpeculationStats, drafted: int, accepted: int) -> None:
    """The same verification once more among those of the shared adapter, which drafted here."""
    stats.shared_drafted_at = _plus_one(stats.shared_drafted_at, drafted)
    stats.shared_accepted_at = _plus_one(stats.shared_accepted_at, accepted)


def _plus_one(counts: list[int], first: int) -> list[int]:
    """`counts` with one more at each of the first `first` positions."""
    return [before + more for before, more in zip_longest(counts, [1] * first, fillvalue=0)]


def stamp_first_tokens(rows: list[Sequence], now: float) -> None:
    """Note the time of each answer's first token: `now`, for those that have one since this round."""
    for row in rows:
        if row.first_token_at is None and row.num_generated:
            row.first_token_at = now


def output_of(row: Sequence, delta: str, now: float) -> RequestOutput:
    """The answer as it stands at `now`, on the monotonic clock; `delta` is the text that is new."""
    first = row.first_token_at
    return RequestOutput(
        request_id=row.request_id,
        prompt=row.prompt,
        text=row.text,
        token_ids=row.generated,
        finish_reason=row.finish_reason,
        expert=row.domain,
        adapter_version=row.adapter_version,
        speculation=copy(row.speculation),  # its lists are replaced, never changed
        num_rejections=len(row.rejected),
        seconds=(row.finished_at or now) - row.arrived_at,
        delta=delta,
        num_prompt_tokens=row.num_prompt_tokens,
        confidence=row.confidence,
        time_to_first_token=None if first is None else first - row.arrived_at,
        logprobs=list(row.logprobs) if row.params.logprobs is not None else None,
        overruled=row.overruled,
        standings=tuple(row.standings) if row.finish_reason else (),
        uncompared=row.uncompared,
    )
