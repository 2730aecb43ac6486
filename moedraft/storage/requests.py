"""Statistics of finished requests, per expert: all time, recently, and at first. Holds no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from moedraft.core import RequestStats, SpeculationStats
from moedraft.storage.db import Home
from moedraft.storage.tables import request_totals, requests

FIRST = 20
RECENT = 50


@dataclass(frozen=True)
class ExpertStats:
    """One expert's sums. Rates are accepted / drafted tokens, None until something was drafted."""

    expert: str
    requests: int
    tokens: int
    steps: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    seconds: float
    acceptance_rate: float | None  # all time
    recent_acceptance_rate: float | None  # last 50 requests that drafted
    first_acceptance_rate: float | None  # first 20 requests that drafted
    lookup_tokens: int = 0  # drafted from the text instead of by the model
    accepted_lookup_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Emitted tokens per verification with a draft, the bonus token included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of answers per step of the target: 1 is plain decoding."""
        return self.tokens / self.steps if self.steps else None


class RequestLog:
    """Keeps the newest `capacity` requests, and for each expert sums over all requests there ever were.

    All methods raise StorageError where the home fails.
    """

    def __init__(self, home: Home, capacity: int = 100_000) -> None:
        self._home = home
        self._capacity = capacity

    def add(self, stats: Sequence[RequestStats]) -> None:
        """Store all of `stats` or none."""
        if not stats:
            return
        with self._home.write() as connection:
            connection.execute(insert(requests), [_row(one) for one in stats])
            for expert in sorted({one.expert for one in stats}):
                _add_to_totals(connection, expert, [one for one in stats if one.expert == expert])
            last = connection.scalar(select(func.max(requests.c.id))) or 0
            connection.execute(delete(requests).where(requests.c.id <= last - self._capacity))

    def summary(self) -> dict[str, ExpertStats]:
        """Statistics of every expert that ever served, those of removed domains included."""
        with self._home.read() as connection:
            totals = connection.execute(select(request_totals).order_by(request_totals.c.expert)).all()
            return {row.expert: _summary(connection, row) for row in totals}

    def rows(
        self, since: float = 0.0, until: float | None = None, expert: str | None = None, limit: int = 100_000
    ) -> list[RequestStats]:
        """The newest `limit` kept requests ended in [since, until), epoch seconds; oldest first."""
        query = select(requests).where(requests.c.created_at >= since)
        if until is not None:
            query = query.where(requests.c.created_at < until)
        if expert is not None:
            query = query.where(requests.c.expert == expert)
        with self._home.read() as connection:
            rows = connection.execute(query.order_by(requests.c.id.desc()).limit(limit)).mappings().all()
        return [_stats(dict(row)) for row in reversed(rows)]

    def series(self, expert: str, bucket: int = 20) -> list[tuple[float, int, int]]:
        """The kept requests in groups of `bucket`, oldest first: (created_at of the last, accepted, drafted).

        Requests without a draft are left out; the last group may be smaller.
        """
        query = (
            select(requests.c.created_at, requests.c.num_accepted_tokens, requests.c.num_draft_tokens)
            .where(requests.c.expert == expert, requests.c.num_draft_tokens > 0)
            .order_by(requests.c.id)
        )
        with self._home.read() as connection:
            rows = connection.execute(query).all()
        groups = [rows[start : start + bucket] for start in range(0, len(rows), bucket)]
        return [(group[-1][0], sum(r[1] for r in group), sum(r[2] for r in group)) for group in groups]


def _row(stats: RequestStats) -> dict[str, Any]:
    """The columns of the table: those of the request and those of its speculation side by side."""
    columns = asdict(stats)
    speculation: dict[str, Any] = columns.pop("speculation")
    return columns | speculation


def _stats(row: Mapping[str, Any]) -> RequestStats:
    speculation = {one.name: row[one.name] for one in fields(SpeculationStats)}
    own = {one.name: row[one.name] for one in fields(RequestStats) if one.name != "speculation"}
    return RequestStats(**own, speculation=SpeculationStats(**speculation))


def _add_to_totals(connection: Connection, expert: str, stats: list[RequestStats]) -> None:
    row = connection.execute(select(request_totals).where(request_totals.c.expert == expert)).one_or_none()
    before = dict.fromkeys(request_totals.c.keys(), 0) if row is None else dict(row._mapping)
    first = [one for one in stats if one.speculation.num_draft_tokens][: FIRST - before["first_requests"]]
    added = {
        "requests": len(stats),
        "tokens": sum(one.num_tokens for one in stats),
        "steps": sum(one.speculation.num_steps for one in stats),
        "drafts": sum(one.speculation.num_drafts for one in stats),
        "draft_tokens": sum(one.speculation.num_draft_tokens for one in stats),
        "accepted_tokens": sum(one.speculation.num_accepted_tokens for one in stats),
        "seconds": sum(one.seconds for one in stats),
        "lookup_tokens": sum(one.speculation.num_lookup_tokens for one in stats),
        "accepted_lookup_tokens": sum(one.speculation.num_accepted_lookup_tokens for one in stats),
        "first_requests": len(first),
        "first_draft_tokens": sum(one.speculation.num_draft_tokens for one in first),
        "first_accepted_tokens": sum(one.speculation.num_accepted_tokens for one in first),
    }
    connection.execute(delete(request_totals).where(request_totals.c.expert == expert))
    sums = {name: before[name] + value for name, value in added.items()}
    connection.execute(insert(request_totals).values(expert=expert, **sums))


def _summary(connection: Connection, totals: Any) -> ExpertStats:
    recent = (
        select(requests.c.num_accepted_tokens, requests.c.num_draft_tokens)
        .where(requests.c.expert == totals.expert, requests.c.num_draft_tokens > 0)
        .order_by(requests.c.id.desc())
        .limit(RECENT)
    )
    rows = connection.execute(recent).all()
    return ExpertStats(
        expert=totals.expert,
        requests=totals.requests,
        tokens=totals.tokens,
        steps=totals.steps,
        drafts=totals.drafts,
        draft_tokens=totals.draft_tokens,
        accepted_tokens=totals.accepted_tokens,
        seconds=totals.seconds,
        acceptance_rate=_rate(totals.accepted_tokens, totals.draft_tokens),
        recent_acceptance_rate=_rate(sum(row[0] for row in rows), sum(row[1] for row in rows)),
        first_acceptance_rate=_rate(totals.first_accepted_tokens, totals.first_draft_tokens),
        lookup_tokens=totals.lookup_tokens,
        accepted_lookup_tokens=totals.accepted_lookup_tokens,
    )


def _rate(accepted: int, drafted: int) -> float | None:
    return accepted / drafted if drafted else None
