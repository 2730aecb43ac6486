"""The data of each page, as figures and tables: the overview, one expert, the router, the learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moedraft.insight.change import (
    Change,
    change_of_first_step_share,
    change_of_tokens_per_step,
    first_step_share,
    newest,
    tokens_per_step,
)
from moedraft.insight.coverage import Coverage
from moedraft.insight.tables.table import Table
from moedraft.storage.requests import ExpertStats


@dataclass(frozen=True)
class Overview:
    """The overview page. Totals are those of the span."""

    requests: int
    tokens: int
    tokens_per_step: float | None  # of the target
    first_step_share: float | None  # of first guesses, those that are right
    acceptance: float | None
    mean_acceptance_length: float | None
    time_to_first_token: float | None  # median, seconds
    throughput: Table
    sources: Table  # where the tokens came from, over time
    by_expert: Table  # tokens per step of the target over time, one column for each expert
    by_figures: Table  # one row for each expert
    experts: tuple[Expert, ...]


def serving(version: int, *, unadapted: bool, pinned: bool) -> str:
    """What drafts: a version, the untrained adapter, or the base alone; and whether a person keeps it so."""
    what = "base" if unadapted else f"v{version}" if version else "untrained"
    return f"{what}, pinned" if pinned else what


@dataclass(frozen=True)
class Expert:
    """One expert's figures: `stats` since the beginning, `share` and the figures after it in the span.

    Guesses are those that it made itself; `shared` also made some for requests of other experts.
    """

    name: str
    registered: bool  # also True for `shared`; False: a domain that was removed
    stats: ExpertStats | None  # None: it never served
    share: float | None  # of the span's requests
    requests: int
    by_shared: float | None  # share of first guesses in those that evidence gave to the shared draft
    tokens_per_step: float | None
    first_step_share: float | None
    acceptance: float | None
    mean_acceptance_length: float | None
    replay_size: int
    replay_oldest: float | None  # epoch seconds
    replay_newest: float | None
    version: int  # live; 0 is the untrained expert
    unadapted: bool  # whether the draft base alone serves it now, since it does better than any adapter
    pinned: bool  # by a person, so that it gets no new version
    updates: int
    coverage: Coverage | None  # None: every token is guessed, or there is no answer yet

    @property
    def serving(self) -> str:
        return serving(self.version, unadapted=self.unadapted, pinned=self.pinned)

    @property
    def recent_tokens_per_step(self) -> float | None:
        """Tokens per target step in its last requests, whenever they were."""
        return tokens_per_step(newest(self.stats))

    @property
    def recent_first_step_share(self) -> float | None:
        return first_step_share(newest(self.stats))

    @property
    def change_of_tokens_per_step(self) -> Change | None:
        """The change of tokens per target step since its first requests."""
        return change_of_tokens_per_step(self.stats) if self.stats else None

    @property
    def change_of_first_step_share(self) -> Change | None:
        return change_of_first_step_share(self.stats) if self.stats else None


@dataclass(frozen=True)
class ExpertView:
    """The page of one expert; `experts` are all there are."""

    expert: Expert
    experts: tuple[Expert, ...]
    progress: Table  # its figures over time
    by_position: Table
    by_language: Table
    versions: Table


@dataclass(frozen=True)
class RouterView:
    """The requests of the span that the router decided, since they named no expert."""

    routed: int
    unknown: int  # how many of them fitted no domain
    overruled: int  # how many of them evidence gave to another expert, or to the shared draft
    confidence: float | None  # mean
    domains: tuple[str, ...]  # registered
    names: tuple[str, ...]  # of all experts, in the order in which they are shown
    shares: Table
    histogram: Table
    unknown_share: Table
    overruled_tokens: int = 0  # as in `SpeculationStats`, of them all
    overruled_gain: float = 0.0


def gained(gain: float, tokens: int) -> str:
    """How the drafts that evidence chose guessed beside the router's; it goes on with a sentence."""
    if not tokens:
        return ""
    more = f"{abs(100 * gain / tokens):.1f} {'fewer' if gain < 0 else 'more'} of 100 tokens right"
    return f"; what drafted then guessed {more} than the router's choice would have ({tokens} compared)"


def overruled(routing: Mapping[str, Any]) -> str:
    """What evidence did, in words. routing: as `storage.requests.RoutingCounts`."""
    more = gained(routing["overruled_gain"], routing["overruled_tokens"])
    return f"overruled the router in {routing['overruled']} of {routing['routed']} requests{more}"


@dataclass(frozen=True)
class LearningView:
    """The updates in the span: an entry for each adapter that an update taught, was reset or taken back."""

    names: tuple[str, ...]  # of all experts, in the order in which they are shown
    updates: Table
    by_expert: Table
    seconds: float
    taught: int  # of the entries, those of adapters that learned
    published: int  # of the entries, those that led to a version
    gain: float | None  # mean of what the gate expected of these versions, in tokens per step of the target
