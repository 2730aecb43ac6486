"""The data of each page, as figures and tables: the overview, one expert, the router, the learning."""

from __future__ import annotations

from dataclasses import dataclass

from moedraft.insight.table import Table
from moedraft.storage.requests import ExpertStats


@dataclass(frozen=True)
class Overview:
    """The overview page. Totals are those of the span."""

    requests: int
    tokens: int
    acceptance: float | None
    mean_acceptance_length: float | None
    time_to_first_token: float | None  # median, seconds
    throughput: Table
    sources: Table  # where the tokens came from, over time
    by_expert: Table  # acceptance over time, one column for each expert
    by_figures: Table  # one row for each expert
    experts: tuple[Expert, ...]


@dataclass(frozen=True)
class Expert:
    """One expert's figures: `stats` since the beginning, `share` and the figures after it in the span."""

    name: str
    registered: bool  # also True for `shared`; False: a domain that was removed
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
    """The page of one expert; `experts` are all there are."""

    expert: Expert
    experts: tuple[Expert, ...]
    acceptance: Table
    by_position: Table
    by_language: Table
    versions: Table


@dataclass(frozen=True)
class RouterView:
    """The requests of the span that the router decided, since they named no expert."""

    routed: int
    unknown: int  # how many of them fitted no domain
    confidence: float | None  # mean
    domains: tuple[str, ...]  # registered
    names: tuple[str, ...]  # of all experts, in the order in which they are shown
    shares: Table
    histogram: Table
    unknown_share: Table


@dataclass(frozen=True)
class LearningView:
    """The updates in the span."""

    names: tuple[str, ...]  # of all experts, in the order in which they are shown
    updates: Table
    by_expert: Table
    seconds: float
    gain: float | None  # mean gain of the updates for which it was measured
