"""Statistics of finished requests, per expert: all time, recently, and at first. Holds no text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Float, delete, func, insert, select, type_coerce

from moedraft.core import SHARED, RequestStats
from moedraft.speculation import SpeculationStats
from moedraft.storage.db import Home
from moedraft.storage.tables import request_totals, requests

FIRST = 20
RECENT = 50
LOOKUPS = ("lookup_tokens", "accepted_lookup_tokens", "earlier_tokens", "accepted_earlier_tokens")
AS_STORED = (
    *("expert", "requests", "tokens", "steps", "seconds", *LOOKUPS),
    *("drafts", "draft_tokens", "accepted_tokens", "first_guesses", "right_first_guesses"),
)
NO_SUMS = ("expert", "first_window")  # columns of the totals that are not sums


class Outcome(NamedTuple):
    """The figures of a request that are compared: tokens, target steps, and its expert's first guesses."""

    tokens: int
    steps: int
    first_guesses: int  # of its own expert that were looked at; 0 where none was, or not yet counted
    right_first_guesses: int


Window = tuple[Outcome, ...]


@dataclass(frozen=True)
class ExpertStats:
    """One expert's sums. Rates are accepted / drafted tokens, None until something was drafted.

    Requests, tokens, steps, seconds and lookups are those of the requests routed to the expert; drafts,
    draft tokens and first guesses are those that the expert itself made. What the shared adapter drafted for
    another expert's request counts for `shared`.
    """

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
    lookup_tokens: int = 0  # drafted from texts instead of by the model
    accepted_lookup_tokens: int = 0
    earlier_tokens: int = 0  # of these two, from earlier answers
    accepted_earlier_tokens: int = 0
    first_guesses: int = 0  # of tokens drafted or not that were looked at, of answers that the expert served
    right_first_guesses: int = 0
    first_window: Window | None = ()  # the first 20 requests; None where they are not known any more
    recent_window: Window = ()  # the last 50 requests, those of `first_window` left out

    @property
    def mean_acceptance_length(self) -> float | None:
        """Emitted tokens per verification with a draft, the bonus token included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of answers per step of the target: 1 is plain decoding."""
        return self.tokens / self.steps if self.steps else None

    @property
    def first_step_share(self) -> float | None:
        """The share of the expert's first guesses that are right, of those that were looked at."""
        return _rate(self.right_first_guesses, self.first_guesses)


@dataclass
class Drafts:
    """What one expert, or the shared adapter, drafted in some requests."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    first_guesses: int = 0
    right_first_guesses: int = 0

    def add(self, more: Drafts, sign: int = 1) -> None:
        for one in fields(Drafts):
            setattr(self, one.name, getattr(self, one.name) + sign * getattr(more, one.name))


def drafts_at(drafted_at: list[int], accepted_at: list[int]) -> Drafts:
    """Counts by draft position → their sums."""
    return Drafts(sum(drafted_at[:1]), sum(drafted_at), sum(accepted_at))


def shared_drafts(stats: RequestStats) -> Drafts:
    """What the shared adapter drafted for a request that has an expert."""
    if stats.expert == SHARED:
        return Drafts()
    own = stats.speculation
    found = drafts_at(own.shared_drafted_at, own.shared_accepted_at)
    found.first_guesses, found.right_first_guesses = own.shared_first_guesses, own.shared_right_first_guesses
    return found


def own_drafts(stats: RequestStats) -> Drafts:
    """What the request's own expert drafted, or the shared adapter where it has none."""
    own = stats.speculation
    # Old requests have no counts by position, but these three.
    found = Drafts(
        own.num_drafts,
        own.num_draft_tokens,
        own.num_accepted_tokens,
        own.first_guesses,
        own.right_first_guesses,
    )
    found.add(shared_drafts(stats), -1)
    return found


def outcome_of(stats: RequestStats) -> Outcome:
    own = own_drafts(stats)
    return Outcome(stats.num_tokens, stats.speculation.num_steps, own.first_guesses, own.right_first_guesses)


class RoutingCounts(NamedTuple):
    """How many requests the router decided, and what evidence made of them."""

    routed: int = 0
    overruled: int = 0
    overruled_tokens: int = 0  # as in `SpeculationStats`
    overruled_gain: float = 0.0


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
            _add_stand_ins(connection, stats)
            last = connection.scalar(select(func.max(requests.c.id))) or 0
            connection.execute(delete(requests).where(requests.c.id <= last - self._capacity))

    def summary(self) -> dict[str, ExpertStats]:
        """Statistics of every expert that ever served, those of removed domains included."""
        with self._home.read() as connection:
            totals = connection.execute(select(request_totals).order_by(request_totals.c.expert)).all()
            return {row.expert: _summary(connection, row) for row in totals}

    def rows(
        self,
        since: float = 0.0,
        until: float | None = None,
        expert: str | None = None,
        limit: int = 100_000,
        *,
        looked_at: bool = False,
    ) -> list[RequestStats]:
        """The newest `limit` kept requests ended in [since, until), epoch seconds; oldest first.

        looked_at: those alone of which first guesses were looked at.
        """
        query = select(requests).where(requests.c.created_at >= since)
        if looked_at:
            query = query.where(requests.c.first_guesses > 0)
        if until is not None:
            query = query.where(requests.c.created_at < until)
        if expert is not None:
            query = query.where(requests.c.expert == expert)
        with self._home.read() as connection:
            rows = connection.execute(query.order_by(requests.c.id.desc()).limit(limit)).mappings().all()
        return [_stats(dict(row)) for row in reversed(rows)]

    def routed_since(self, since: float) -> int:
        """How many of the kept requests that ended at `since` (epoch seconds) or later the router decided."""
        decided = requests.c.confidence.is_not(None) & (requests.c.created_at >= since)
        with self._home.read() as connection:
            return connection.scalar(select(func.count()).where(decided)) or 0

    def routing(self) -> RoutingCounts:
        """Of the kept requests those that the router decided."""
        sums = [func.sum(type_coerce(requests.c[name], Float)) for name in RoutingCounts._fields[1:]]
        query = select(func.count(), *sums).where(requests.c.confidence.is_not(None))
        with self._home.read() as connection:
            routed, overruled, tokens, gain = (value or 0 for value in connection.execute(query).one())
        return RoutingCounts(routed, int(overruled), int(tokens), gain)

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
    before = _totals(connection, expert)
    drafting = [drafts for one in stats if (drafts := own_drafts(one)).draft_tokens]
    first = drafting[: max(0, FIRST - before["first_requests"])]
    window = before["first_window"]
    if window is not None:
        window = [*window, *(list(outcome_of(one)) for one in stats)][:FIRST]
    added = {
        "requests": len(stats),
        "tokens": sum(one.num_tokens for one in stats),
        "steps": sum(one.speculation.num_steps for one in stats),
        "seconds": sum(one.seconds for one in stats),
        **{name: sum(getattr(one.speculation, f"num_{name}") for one in stats) for name in LOOKUPS},
        "first_requests": len(first),
        "first_draft_tokens": sum(one.draft_tokens for one in first),
        "first_accepted_tokens": sum(one.accepted_tokens for one in first),
        **_summed(own_drafts(one) for one in stats),
    }
    _store_totals(connection, expert, before, added, window)


def _add_stand_ins(connection: Connection, stats: Sequence[RequestStats]) -> None:
    """Count for `shared` what it drafted for the requests of experts."""
    added = _summed(shared_drafts(one) for one in stats)
    if any(added.values()):
        before = _totals(connection, SHARED)
        _store_totals(connection, SHARED, before, added, before["first_window"])


def _summed(parts: Iterable[Drafts]) -> dict[str, int]:
    total = Drafts()
    for part in parts:
        total.add(part)
    return asdict(total)


def _totals(connection: Connection, expert: str) -> dict[str, Any]:
    """The row of an expert; zeros and an empty first window where there is none yet."""
    row = connection.execute(select(request_totals).where(request_totals.c.expert == expert)).one_or_none()
    if row is not None:
        return dict(row._mapping)
    return {**dict.fromkeys(request_totals.c.keys(), 0), "first_window": []}


def _store_totals(
    connection: Connection,
    expert: str,
    before: Mapping[str, Any],
    added: Mapping[str, float],
    window: list[list[int]] | None,
) -> None:
    sums = {name: value + added.get(name, 0) for name, value in before.items() if name not in NO_SUMS}
    connection.execute(delete(request_totals).where(request_totals.c.expert == expert))
    connection.execute(insert(request_totals).values(expert=expert, first_window=window, **sums))


def _summary(connection: Connection, totals: Any) -> ExpertStats:
    newest = _newest(connection, totals.expert)
    recent = _summed(own_drafts(one) for one in _drafting(connection, totals.expert, newest))
    return ExpertStats(
        **{name: getattr(totals, name) for name in AS_STORED},
        acceptance_rate=_rate(totals.accepted_tokens, totals.draft_tokens),
        recent_acceptance_rate=_rate(recent["accepted_tokens"], recent["draft_tokens"]),
        first_acceptance_rate=_rate(totals.first_accepted_tokens, totals.first_draft_tokens),
        first_window=_window(totals.first_window),
        recent_window=_recent_window(newest, totals.requests),
    )


def _window(rows: list[list[int]] | None) -> Window | None:
    return None if rows is None else tuple(Outcome(*row) for row in rows)


def _recent_window(newest: list[RequestStats], requests: int) -> Window:
    """The newest requests, oldest first, without those of the first window, so that the two compare."""
    later = max(0, requests - FIRST)
    return tuple(outcome_of(one) for one in reversed(newest[:later]))


def _drafting(connection: Connection, expert: str, newest: list[RequestStats]) -> list[RequestStats]:
    """The newest requests that drafted; as a rule these are the newest of all."""
    if all(one.speculation.num_draft_tokens for one in newest):
        return newest
    return _newest(connection, expert, requests.c.num_draft_tokens > 0)


def _newest(connection: Connection, expert: str, *wanted: ColumnElement[bool]) -> list[RequestStats]:
    """The last RECENT requests of an expert, newest first."""
    query = select(requests).where(requests.c.expert == expert, *wanted).order_by(requests.c.id.desc())
    return [_stats(dict(row)) for row in connection.execute(query.limit(RECENT)).mappings()]


def _rate(accepted: int, drafted: int) -> float | None:
    return accepted / drafted if drafted else None
