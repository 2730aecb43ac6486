"""Reads a home's store and builds the views that are shown of it: overview, experts, router, learning.

The dashboard's pages, its CSV files and `moedraft stats --plot` all take their numbers from here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from moedraft.core import SHARED, ReplayRecord, UpdateRecord
from moedraft.insight.columns import RequestReader, Requests, ratio
from moedraft.insight.coverage import Coverage, coverage
from moedraft.insight.tables import figures
from moedraft.insight.tables.expert_tables import experts_table, versions_table
from moedraft.insight.tables.spans import Grid, TimeSpan, grid_of
from moedraft.insight.views import Expert, ExpertView, LearningView, Overview, RouterView
from moedraft.storage.changes import is_pinned
from moedraft.storage.requests import ExpertStats
from moedraft.storage.store import Store

T = TypeVar("T")

FRESH = 1.0  # seconds for which a view is reused for other readers
KEPT_VIEWS = 64
UPDATES = 500  # so many are read first, and more only if a span needs them


class Observer:
    """Builds read-only views of a home. Its methods raise StorageError.

    Thread-safe. A view that was built within the last FRESH seconds is reused.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._reader = RequestReader(store.requests.rows, clock=clock)
        self._views: dict[tuple[Any, ...], tuple[float, Any]] = {}
        self._covered: dict[str, tuple[tuple[int, int], Coverage | None]] = {}
        self._lock = threading.Lock()

    # -- views -----------------------------------------------------------------------------------

    def overview(self, span: TimeSpan) -> Overview:
        return self._fresh(("overview", span), lambda: self._overview(span))

    def experts(self, span: TimeSpan) -> tuple[Expert, ...]:
        """All experts: `shared`, the registered domains, then removed ones that once served."""
        return self._fresh(("experts", span), lambda: self._experts(*self._look(span)[:1]))

    def expert(self, name: str, span: TimeSpan) -> ExpertView | None:
        """One expert; None if it is neither registered nor has ever served."""
        return self._fresh(("expert", name, span), lambda: self._expert(name, span))

    def router(self, span: TimeSpan) -> RouterView:
        return self._fresh(("router", span), lambda: self._router(span))

    def learning(self, span: TimeSpan) -> LearningView:
        return self._fresh(("learning", span), lambda: self._learning(span))

    def _fresh(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The view stored under `key`, or one built now if that is too old. One caller builds at a time."""
        with self._lock:
            made, view = self._views.get(key, (-math.inf, None))
            if not made <= self._clock() < made + FRESH:
                view = make()
                if len(self._views) >= KEPT_VIEWS:
                    self._views.clear()
                self._views[key] = self._clock(), view
            found: T = view
            return found

    def _look(self, span: TimeSpan) -> tuple[Requests, Grid]:
        """The requests of `span`, and its division into steps."""
        now = self._clock()
        ahead = grid_of(span, now, None).start if span.seconds else 0.0
        everything = self._reader.read(ahead)
        at = everything["created_at"]
        grid = grid_of(span, now, float(at.min()) if len(at) else None)
        return everything.between(grid.start, grid.end), grid

    # -- overview and experts --------------------------------------------------------------------

    def _overview(self, span: TimeSpan) -> Overview:
        requests, grid = self._look(span)
        experts = self._experts(requests)
        busy = [expert.name for expert in experts if expert.requests]
        waited = requests["time_to_first_token"]
        waited = waited[np.isfinite(waited)]
        return Overview(
            requests=len(requests),
            tokens=requests.total("num_tokens"),
            tokens_per_step=requests.tokens_per_step,
            first_step_share=requests.first_step_share,
            acceptance=requests.acceptance,
            mean_acceptance_length=requests.mean_acceptance_length,
            time_to_first_token=float(np.median(waited)) if len(waited) else None,
            throughput=figures.throughput(requests, grid),
            sources=figures.sources(requests, grid),
            by_expert=figures.tokens_per_step_by_expert(requests, grid, busy),
            by_figures=experts_table(experts),
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
        return [SHARED, *(name for name, _ in self._store.registry.domain_names())]

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._registered(), *self._store.requests.summary()]))

    def _figures(
        self, name: str, registered: bool, requests: Requests, served: ExpertStats | None, size: int
    ) -> Expert:
        own, drafts = requests.of(name), requests.drafted_by(name)
        live = self._store.registry.live(name)
        oldest, newest = (self._replay_end(name, newest) if size else None for newest in (False, True))
        return Expert(
            name=name,
            registered=registered,
            stats=served,
            share=ratio(len(own), len(requests)),
            requests=len(own),
            by_shared=ratio(own.total("shared_first_guesses"), own.total("first_guesses")),
            tokens_per_step=own.tokens_per_step,
            first_step_share=drafts.first_step_share,
            acceptance=drafts.acceptance,
            mean_acceptance_length=drafts.mean_acceptance_length,
            replay_size=size,
            replay_oldest=oldest.created_at if oldest else None,
            replay_newest=newest.created_at if newest else None,
            version=live.version if live else 0,
            unadapted=name in self._store.registry.unadapted(),
            pinned=is_pinned(self._store.registry, name),
            updates=self._store.registry.updates(name),
            coverage=self._coverage(name, newest.id if newest else 0),
        )

    def _replay_end(self, name: str, newest: bool) -> ReplayRecord | None:
        return next(iter(self._store.replay.records(name, limit=1, newest_first=newest)), None)

    def _coverage(self, name: str, last_id: int) -> Coverage | None:
        """Counted again only where another version serves somewhere, or the domain has a new answer."""
        key = (self._store.registry.generation(), last_id)
        before = self._covered.get(name)
        if before is None or before[0] != key:
            self._covered[name] = before = key, coverage(self._store, name) if last_id else None
        return before[1]

    def _expert(self, name: str, span: TimeSpan) -> ExpertView | None:
        requests, grid = self._look(span)
        experts = self._experts(requests)
        expert = next((one for one in experts if one.name == name), None)
        if expert is None:
            return None
        return ExpertView(
            expert=expert,
            experts=experts,
            progress=figures.progress(requests, name, grid),
            by_position=figures.by_position(requests.drafted_by(name)),
            by_language=figures.by_language(requests, name),
            versions=versions_table(self._store.registry.versions(name), requests, name),
        )

    # -- router ----------------------------------------------------------------------------------

    def _router(self, span: TimeSpan) -> RouterView:
        requests, grid = self._look(span)
        routed = requests.where(np.isfinite(requests["confidence"]))
        names = self._names()
        served = [name for name in names if name != SHARED and len(routed.of(name))]
        return RouterView(
            routed=len(routed),
            unknown=len(routed.of(SHARED)),
            overruled=int(np.nansum(routed["overruled"])),
            confidence=float(routed["confidence"].mean()) if len(routed) else None,
            domains=tuple(name for name, _ in self._store.registry.domain_names()),
            names=names,
            shares=figures.shares(routed, grid, [*served, SHARED]),
            histogram=figures.confidences(routed),
            unknown_share=figures.unknown(routed, grid),
            overruled_tokens=int(np.nansum(routed["overruled_tokens"])),
            overruled_gain=float(np.nansum(routed["overruled_gain"])),
        )

    # -- learning --------------------------------------------------------------------------------

    def _learning(self, span: TimeSpan) -> LearningView:
        now = self._clock()
        everything = self._updates(grid_of(span, now, None).start if span.seconds else -math.inf)
        grid = grid_of(span, now, everything[0].created_at if everything else None)
        updates = [update for update in everything if update.created_at >= grid.start]
        published = [update for update in updates if figures.is_published(update)]
        gains = [update.gain for update in published if update.gain is not None]
        return LearningView(
            names=self._names(),
            updates=figures.updates_table(updates, grid),
            by_expert=figures.updates_by_expert(updates),
            seconds=sum(update.seconds for update in updates),
            taught=sum(update.steps > 0 for update in updates),
            published=len(published),
            gain=ratio(sum(gains), len(gains)),
        )

    def _updates(self, since: float) -> list[UpdateRecord]:
        """The newest updates, oldest first, including at least all since the time `since`."""
        limit = UPDATES
        while True:
            found = self._store.updates.recent(limit=limit)
            if len(found) < limit or found[0].created_at < since:
                return found
            limit *= 4
