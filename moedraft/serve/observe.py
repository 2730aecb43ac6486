"""What can be seen of a running system: figures and tables from the store, the worker and the trainer.

Reads only. The dashboard's pages, its CSV files and `moedraft stats` all take their numbers from here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from moedraft.core import SHARED, UpdateRecord
from moedraft.serve import figures
from moedraft.serve.columns import RequestReader, Requests, ratio
from moedraft.serve.spans import Grid, Span, grid_of
from moedraft.serve.tables import Column, Row, Table
from moedraft.storage.requests import ExpertStats
from moedraft.storage.store import Store

T = TypeVar("T")

FRESH = 1.0  # seconds for which a view is shown again to whoever else looks
KEPT_VIEWS = 64
UPDATES = 500  # are read first; more of them where a span reaches further back


@dataclass(frozen=True)
class Overview:
    """Everything at a glance. Totals are those of the span."""

    requests: int
    tokens: int
    acceptance: float | None
    mean_acceptance_length: float | None
    time_to_first_token: float | None  # median, seconds
    throughput: Table
    sources: Table  # of the tokens, over time
    by_expert: Table  # acceptance over time, one column an expert
    by_figures: Table  # one row an expert
    experts: tuple[Expert, ...]


@dataclass(frozen=True)
class Expert:
    """One expert's figures. `stats` is of all time, what follows `share` of the span."""

    name: str
    registered: bool  # or `shared`; False: a domain that was removed
    stats: ExpertStats | None  # None: it never served
    share: float | None  # of the span's requests
    requests: int
    acceptance: float | None
    mean_acceptance_length: float | None
    replay_size: int
    replay_oldest: float | None  # epoch seconds
    replay_newest: float | None
    version: int  # live; 0 is the untrained expert
    updates: int


@dataclass(frozen=True)
class ExpertView:
    """One expert closely, among all of them."""

    expert: Expert
    experts: tuple[Expert, ...]
    acceptance: Table
    by_position: Table
    by_language: Table
    versions: Table


@dataclass(frozen=True)
class RouterView:
    """Where the router sent the span's requests that were not pinned to an expert."""

    routed: int
    unknown: int  # of them, those that fit no domain
    confidence: float | None  # mean
    domains: tuple[str, ...]  # registered
    names: tuple[str, ...]  # of all experts, in their order
    shares: Table
    histogram: Table
    unknown_share: Table


@dataclass(frozen=True)
class LearningView:
    """The updates of the span."""

    names: tuple[str, ...]  # of all experts, in their order
    updates: Table
    by_expert: Table
    seconds: float
    gain: float | None  # mean of those that were measured


class Observer:
    """Read-only views of a home; of the running parts where there are some. Raises StorageError.

    Safe to call from several threads. A view that was just made is given again to the next who asks.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._reader = RequestReader(store.requests.rows, clock=clock)
        self._views: dict[tuple[Any, ...], tuple[float, Any]] = {}
        self._lock = threading.Lock()

    # -- views -----------------------------------------------------------------------------------

    def overview(self, span: Span) -> Overview:
        return self._fresh(("overview", span), lambda: self._overview(span))

    def experts(self, span: Span) -> tuple[Expert, ...]:
        """`shared`, the registered domains, then removed ones that served."""
        return self._fresh(("experts", span), lambda: self._experts(*self._look(span)[:1]))

    def expert(self, name: str, span: Span) -> ExpertView | None:
        """None where no such expert is registered or ever served."""
        return self._fresh(("expert", name, span), lambda: self._expert(name, span))

    def router(self, span: Span) -> RouterView:
        return self._fresh(("router", span), lambda: self._router(span))

    def learning(self, span: Span) -> LearningView:
        return self._fresh(("learning", span), lambda: self._learning(span))

    def _fresh(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The view of `key` if it is new enough, else one made now, by one caller at a time."""
        with self._lock:
            made, view = self._views.get(key, (-math.inf, None))
            if not made <= self._clock() < made + FRESH:
                view = make()
                if len(self._views) >= KEPT_VIEWS:
                    self._views.clear()
                self._views[key] = self._clock(), view
            found: T = view
            return found

    def _look(self, span: Span) -> tuple[Requests, Grid]:
        """The requests of `span` and its steps."""
        now = self._clock()
        ahead = grid_of(span, now, None).start if span.seconds else 0.0
        everything = self._reader.read(ahead)
        at = everything["created_at"]
        grid = grid_of(span, now, float(at.min()) if len(at) else None)
        return everything.between(grid.start, grid.end), grid

    # -- overview and experts --------------------------------------------------------------------

    def _overview(self, span: Span) -> Overview:
        requests, grid = self._look(span)
        experts = self._experts(requests)
        waited = requests["time_to_first_token"]
        waited = waited[np.isfinite(waited)]
        return Overview(
            requests=len(requests),
            tokens=requests.total("num_tokens"),
            acceptance=requests.acceptance,
            mean_acceptance_length=requests.mean_acceptance_length,
            time_to_first_token=float(np.median(waited)) if len(waited) else None,
            throughput=figures.throughput(requests, grid),
            sources=figures.sources(requests, grid),
            by_expert=figures.acceptance_by_expert(requests, grid, [e.name for e in experts if e.requests]),
            by_figures=_figures_table(experts),
            experts=experts,
        )

    def _experts(self, requests: Requests) -> tuple[Expert, ...]:
        served, sizes = self._store.requests.summary(), self._store.replay.sizes()
        registered = self._registered()
        return tuple(
            self._figures(name, name in registered, requests, served.get(name), sizes.get(name, 0))
            for name in dict.fromkeys([*registered, *served])
        )

    def _registered(self) -> list[str]:
        return [SHARED, *(domain.name for domain in self._store.registry.domains())]

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._registered(), *self._store.requests.summary()]))

    def _figures(
        self, name: str, registered: bool, requests: Requests, served: ExpertStats | None, size: int
    ) -> Expert:
        own = requests.of(name)
        live = self._store.registry.live(name)
        oldest, newest = (self._replay_end(name, newest) if size else None for newest in (False, True))
        return Expert(
            name=name,
            registered=registered,
            stats=served,
            share=ratio(len(own), len(requests)),
            requests=len(own),
            acceptance=own.acceptance,
            mean_acceptance_length=own.mean_acceptance_length,
            replay_size=size,
            replay_oldest=oldest,
            replay_newest=newest,
            version=live.version if live else 0,
            updates=self._store.registry.updates(name),
        )

    def _replay_end(self, name: str, newest: bool) -> float | None:
        found = self._store.replay.records(name, limit=1, newest_first=newest)
        return found[0].created_at if found else None

    def _expert(self, name: str, span: Span) -> ExpertView | None:
        requests, grid = self._look(span)
        experts = self._experts(requests)
        expert = next((one for one in experts if one.name == name), None)
        if expert is None:
            return None
        own = requests.of(name)
        return ExpertView(
            expert=expert,
            experts=experts,
            acceptance=figures.acceptance(own, grid),
            by_position=figures.by_position(own),
            by_language=figures.by_language(own),
            versions=self._versions(name, own),
        )

    def _versions(self, name: str, own: Requests) -> Table:
        rows: list[Row] = []
        for version in reversed(self._store.registry.versions(name)):
            served = own.where((own["adapter_version"] == version.version) & (own["num_drafts"] > 0))
            rows.append(
                (
                    version.version,
                    version.state,
                    version.created_at,
                    version.parent,
                    version.acceptance,
                    len(served),
                    served.acceptance,
                )
            )
        columns = (
            Column("version", "version", "count"),
            Column("state", "state", "text"),
            Column("created_at", "made", "time"),
            Column("parent", "made from", "count"),
            Column("held_out_acceptance", "when made", "share"),
            Column("requests", "requests", "count"),
            Column("acceptance_rate", "in traffic", "share"),
        )
        return Table("versions", columns, tuple(rows))

    # -- router ----------------------------------------------------------------------------------

    def _router(self, span: Span) -> RouterView:
        requests, grid = self._look(span)
        routed = requests.where(np.isfinite(requests["confidence"]))
        names = self._names()
        served = [name for name in names if name != SHARED and len(routed.of(name))]
        return RouterView(
            routed=len(routed),
            unknown=len(routed.of(SHARED)),
            confidence=float(routed["confidence"].mean()) if len(routed) else None,
            domains=tuple(domain.name for domain in self._store.registry.domains()),
            names=names,
            shares=figures.shares(routed, grid, [*served, SHARED]),
            histogram=figures.confidences(routed),
            unknown_share=figures.unknown(routed, grid),
        )

    # -- learning --------------------------------------------------------------------------------

    def _learning(self, span: Span) -> LearningView:
        now = self._clock()
        everything = self._updates(grid_of(span, now, None).start if span.seconds else -math.inf)
        grid = grid_of(span, now, everything[0].created_at if everything else None)
        updates = [update for update in everything if update.created_at >= grid.start]
        gains = [gain for gain in map(figures.gain_of, updates) if gain is not None]
        return LearningView(
            names=self._names(),
            updates=figures.updates_table(updates, grid),
            by_expert=figures.updates_by_expert(updates),
            seconds=sum(update.seconds for update in updates),
            gain=ratio(sum(gains), len(gains)),
        )

    def _updates(self, since: float) -> list[UpdateRecord]:
        """The newest updates, oldest first: at least all since then."""
        limit = UPDATES
        while True:
            found = self._store.updates.recent(limit=limit)
            if len(found) < limit or found[0].created_at < since:
                return found
            limit *= 4


def _figures_table(experts: tuple[Expert, ...]) -> Table:
    """What `Expert` holds, one row each; rates and sums that are not of the span say so in their key."""
    columns = (
        Column("expert", "expert", "text"),
        Column("requests", "requests", "count"),
        Column("share", "share of traffic", "share"),
        Column("acceptance_rate", "acceptance", "share"),
        Column("mean_acceptance_length", "mean length", "number"),
        Column("recent_acceptance_rate", "now", "share"),
        Column("first_acceptance_rate", "at registration", "share"),
        Column("replay_size", "replay", "count"),
        Column("version", "version", "count"),
        Column("updates", "updates", "count"),
        Column("all_requests", "requests ever", "count"),
        Column("all_tokens", "tokens ever", "count"),
        Column("all_drafts", "drafts ever", "count"),
        Column("all_draft_tokens", "drafted ever", "count"),
        Column("all_accepted_tokens", "accepted ever", "count"),
    )
    return Table("experts", columns, tuple(_figures_row(expert) for expert in experts))


def _figures_row(expert: Expert) -> Row:
    stats = expert.stats
    ever = (
        (stats.requests, stats.tokens, stats.drafts, stats.draft_tokens, stats.accepted_tokens)
        if stats
        else (0, 0, 0, 0, 0)
    )
    return (
        *(expert.name, expert.requests, expert.share, expert.acceptance, expert.mean_acceptance_length),
        *(stats.recent_acceptance_rate if stats else None, stats.first_acceptance_rate if stats else None),
        *(expert.replay_size, expert.version, expert.updates),
        *ever,
    )
