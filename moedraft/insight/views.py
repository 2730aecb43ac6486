"""What one page shows, as figures and tables: the overview, one expert, the router, the learning."""

from __future__ import annotations

from dataclasses import dataclass

from moedraft.insight.table import Table
from moedraft.storage.requests import ExpertStats


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
