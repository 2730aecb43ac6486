"""Computes tables from requests and updates. Reads no store: equal rows give equal tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moedraft.core import SHARED, UpdateRecord
from moedraft.insight.columns import GUESSES, Codes, Requests, ratio
from moedraft.insight.tables.spans import Grid
from moedraft.insight.tables.table import Cell, Column, Kind, Mark, Row, Table

BINS = 10  # intervals of the router's confidence, in the histogram
ALL = "all experts"

AT = Column("at", "from", "time")
LENGTH = Column("mean_acceptance_length", "mean length", "number")
PER_STEP = Column("tokens_per_step", "tokens per target step", "number")
FIRST_STEP = Column("first_step_share", "first guesses right", "share")
SPEED = (Column("tokens", "tokens", "count"), Column("steps", "target steps", "count"), PER_STEP)
FIRST_GUESSES = (
    Column("first_guesses", "first guesses looked at", "count"),
    Column("right_first_guesses", "of these right", "count"),
    FIRST_STEP,
)
ACCEPTANCE = (
    Column("draft_tokens", "drafted", "count"),
    Column("accepted_tokens", "accepted", "count"),
    Column("acceptance_rate", "acceptance", "share"),
)
SOURCES = {
    "draft": "draft model",
    "text": "looked up in the text",
    "earlier": "looked up in earlier answers",
    "target": "target itself",
}
_DRAFTED = ("num_draft_tokens", "num_accepted_tokens")
_SPEED = ("num_tokens", "num_steps")


def _steps(key: str, grid: Grid, columns: Sequence[Column], rows: Sequence[Row], *marks: Mark) -> Table:
    """A table with one row for each step of the grid; the first column is its starting time."""
    dated = tuple((at, *row) for at, row in zip(grid.starts, rows, strict=True))
    return Table(key, (AT, *columns), dated, marks, grid.start, grid.now)


def throughput(requests: Requests, grid: Grid) -> Table:
    """Requests and tokens in each step; the tokens of an answer count when it ends.

    A step that has only just begun has no speed yet.
    """
    steps = grid.steps(requests["created_at"])
    tokens = requests.sums(steps, grid.count, ["num_tokens"])[:, 0].tolist()
    answers = np.bincount(steps, minlength=grid.count).tolist()
    rows = [
        (n, t, t / length if length >= grid.width / 3 else None)
        for n, t, length in zip(answers, tokens, grid.lengths, strict=True)
    ]
    columns = [
        Column("requests", "requests", "count"),
        Column("tokens", "tokens", "count"),
        Column("tokens_per_second", "tokens/s", "number"),
    ]
    return _steps("throughput", grid, columns, rows)


def sources(requests: Requests, grid: Grid) -> Table:
    """The sources of the tokens in each step: see SOURCES.

    The target itself adds one token in each of its steps. What requests of older versions found in earlier
    answers counts as found in the text.
    """
    steps = grid.steps(requests["created_at"])
    names = ["num_accepted_tokens", "num_accepted_lookup_tokens", "num_accepted_earlier_tokens", "num_tokens"]
    rows = list[Row]()
    for guessed, found, earlier, tokens in requests.sums(steps, grid.count, names).tolist():
        parts = (guessed, found - earlier, earlier, tokens - guessed - found)
        rows.append((*parts, *(ratio(part, tokens) for part in parts)))
    counts = [Column(f"from_{key}", f"{label}, tokens", "count") for key, label in SOURCES.items()]
    shares = [Column(f"{key}_share", label, "share") for key, label in SOURCES.items()]
    return _steps("sources", grid, [*counts, *shares], rows)


def progress(requests: Requests, expert: str, grid: Grid) -> Table:
    """One expert's figures in each step, with a mark where its adapter version changed.

    Tokens and steps are those of its own traffic, guesses and drafts those that it made itself.
    """
    own, drafts = requests.of(expert), requests.drafted_by(expert)
    steps, drafting = grid.steps(own["created_at"]), grid.steps(drafts["created_at"])
    answers = np.bincount(steps, minlength=grid.count).tolist()
    speed = own.sums(steps, grid.count, _SPEED).tolist()
    guesses = drafts.sums(drafting, grid.count, GUESSES).tolist()
    drafted = drafts.sums(drafting, grid.count, [*_DRAFTED, "num_drafts"]).tolist()
    rows = [
        (n, t, s, ratio(t, s), g, hit, ratio(hit, g), d, a, ratio(a, d), 1 + a / k if k else None)
        for n, (t, s), (g, hit), (d, a, k) in zip(answers, speed, guesses, drafted, strict=True)
    ]
    columns = [Column("requests", "requests", "count"), *SPEED, *FIRST_GUESSES, *ACCEPTANCE, LENGTH]
    return _steps("progress", grid, columns, rows, *_version_marks(own, steps))


def _version_marks(requests: Requests, steps: Codes) -> list[Mark]:
    """A mark at each step whose last request used another version than the step before.

    Requests that drafted nothing do not count. Versions are compared step by step, not request by request,
    since requests that began with the old version may end after the first one with the new version.
    """
    drafted = requests["num_drafts"] > 0
    at, versions = requests["created_at"][drafted], requests["adapter_version"][drafted].astype(int)
    marks, before = list[Mark](), None
    for step in np.unique(steps[drafted]):
        inside = np.flatnonzero(steps[drafted] == step)
        now = int(versions[inside[-1]])
        if before is not None and now != before:
            first = inside[versions[inside] == now][0]
            marks.append(Mark(float(at[first]), f"v{now}"))
        before = now
    return marks


def tokens_per_step_by_expert(requests: Requests, grid: Grid, experts: Sequence[str]) -> Table:
    """Tokens for each step of the target, in one column for all requests and one for each expert."""
    columns = [Column("all", ALL, "number"), *_of_experts(experts, "number")]
    parts = [_tokens_per_step(part, grid) for part in (requests, *map(requests.of, experts))]
    return _steps("tokens_per_step", grid, columns, list(zip(*parts, strict=True)))


def _of_experts(names: Sequence[str], kind: Kind = "share") -> list[Column]:
    """A column for each expert. The prefix keeps its key different from those of other columns."""
    return [Column(f"expert {name}", name, kind) for name in names]


def _tokens_per_step(requests: Requests, grid: Grid) -> list[float | None]:
    sums = requests.sums(grid.steps(requests["created_at"]), grid.count, _SPEED).tolist()
    return [ratio(tokens, steps) for tokens, steps in sums]


def by_position(requests: Requests) -> Table:
    """Acceptance by position in the draft; position 1 is the first drafted token."""
    drafted, accepted = requests.drafted_at.sum(axis=0).tolist(), requests.accepted_at.sum(axis=0).tolist()
    rows = [(i + 1, d, a, a / d) for i, (d, a) in enumerate(zip(drafted, accepted, strict=True)) if d]
    return Table("by_position", (Column("position", "position", "count"), *ACCEPTANCE), tuple(rows))


def by_language(requests: Requests, expert: str) -> Table:
    """One expert's figures by the writing system of the prompt, the most frequent first."""
    own, drafts = requests.of(expert), requests.drafted_by(expert)
    rows = list[Row]()
    for code, name in enumerate(requests.lang_names):
        asked, guessed = own.where(own.langs == code), drafts.where(drafts.langs == code)
        if len(asked):
            speed = (asked.total("num_tokens"), asked.total("num_steps"), asked.tokens_per_step)
            counts = [guessed.total(key) for key in GUESSES]
            rows.append((name, len(asked), *speed, *counts, guessed.first_step_share))
    first = (Column("lang", "writing", "text"), Column("requests", "requests", "count"))
    columns = (*first, *SPEED, *FIRST_GUESSES)
    return Table("by_language", columns, tuple(sorted(rows, key=lambda row: (-_count(row[1]), str(row[0])))))


def _count(cell: Cell) -> int:
    return cell if isinstance(cell, int) else 0


# -- the router ----------------------------------------------------------------------------------


def shares(routed: Requests, grid: Grid, experts: Sequence[str]) -> Table:
    """Each expert's share of the routed requests, in each step."""
    steps = grid.steps(routed["created_at"])
    every = np.bincount(steps, minlength=grid.count)
    counts = [np.bincount(steps[_is(routed, name)], minlength=grid.count) for name in experts]
    rows = [
        (total, *(ratio(part, total) for part in parts))
        for total, *parts in zip(*(column.tolist() for column in (every, *counts)), strict=True)
    ]
    columns = [Column("requests", "requests", "count"), *_of_experts(experts)]
    return _steps("shares", grid, columns, rows)


def confidences(routed: Requests) -> Table:
    """A histogram of the router's confidence, in two columns: sent to an expert, or fitting no domain."""
    bins = np.clip((routed["confidence"] * BINS).astype(np.int64), 0, BINS - 1)
    unknown = _is(routed, SHARED)
    counts = [np.bincount(bins[chosen], minlength=BINS).tolist() for chosen in (~unknown, unknown)]
    rows = tuple((i / BINS, (i + 1) / BINS, *pair) for i, pair in enumerate(zip(*counts, strict=True)))
    columns = (
        Column("from", "from", "share"),
        Column("to", "to", "share"),
        Column("to_an_expert", "to an expert", "count"),
        Column("fits_none", "fits none", "count"),
    )
    return Table("confidences", columns, rows if len(routed) else ())


def unknown(routed: Requests, grid: Grid) -> Table:
    """The share of routed requests that fit no domain, and the mean confidence, in each step."""
    steps = grid.steps(routed["created_at"])
    every = np.bincount(steps, minlength=grid.count)
    strange = np.bincount(steps[_is(routed, SHARED)], minlength=grid.count)
    sure = np.bincount(steps, weights=routed["confidence"], minlength=grid.count)
    rows = [
        (n, none, ratio(none, n), ratio(total, n))
        for n, none, total in zip(every.tolist(), strange.tolist(), sure.tolist(), strict=True)
    ]
    columns = [
        Column("requests", "requests", "count"),
        Column("unknown", "fit none", "count"),
        Column("unknown_share", "share that fits none", "share"),
        Column("confidence", "mean confidence", "share"),
    ]
    return _steps("unknown", grid, columns, rows)


def _is(requests: Requests, expert: str) -> NDArray[np.bool_]:
    code = requests.expert_names.index(expert) if expert in requests.expert_names else -1
    return np.asarray(requests.experts == code)


# -- learning ------------------------------------------------------------------------------------


def gain_of(update: UpdateRecord) -> float | None:
    """The gain in acceptance on held-out records; None if it was not measured before and after."""
    if update.acceptance_after is None or update.acceptance_before is None:
        return None
    return update.acceptance_after - update.acceptance_before


def is_published(update: UpdateRecord) -> bool:
    """Whether it led to a version; without a gate, of an adapter that is not pinned, every update does."""
    if update.decision is None:
        return update.version != update.parent
    return update.decision in ("promote", "along")


def updates_table(updates: Sequence[UpdateRecord], grid: Grid) -> Table:
    """The updates, oldest first."""
    columns = (
        Column("at", "at", "time"),
        Column("expert", "expert", "text"),
        *(Column(key, key, "count") for key in ("version", "records", "steps")),
        Column("loss", "loss", "number"),
        Column("seconds", "time", "seconds"),
        Column("acceptance_before", "before", "share"),
        Column("acceptance_after", "after", "share"),
        Column("gain", "gain", "gain"),
        Column("decision", "gate", "text"),
        Column("gate_gain", "tokens per step", "number"),
        *(Column(f"gate_{key}", f"at {key}", "number") for key in ("least", "most")),
        Column("gate_witness", "surely likelier", "share"),
        Column("gate_records", "judged by", "count"),
        Column("reason", "reason", "text"),
    )
    rows = tuple(
        (
            *(one.created_at, one.expert, one.version, one.records, one.steps, one.loss, one.seconds),
            *(one.acceptance_before, one.acceptance_after, gain_of(one), one.decision),
            *(one.gain, one.gain_low, one.gain_high, one.witness, one.gate_records, one.reason),
        )
        for one in updates
    )
    return Table("updates", columns, rows, (), grid.start, grid.now)


def updates_by_expert(updates: Sequence[UpdateRecord]) -> Table:
    """The number of updates of each adapter, the time they took, and their mean gain."""
    rows = list[Row]()
    for name in dict.fromkeys(update.expert for update in updates):
        own = [update for update in updates if update.expert == name]
        gains = [gain for gain in map(gain_of, own) if gain is not None]
        rows.append((name, len(own), sum(one.seconds for one in own), ratio(sum(gains), len(gains))))
    columns = (
        Column("expert", "expert", "text"),
        Column("updates", "updates", "count"),
        Column("seconds", "time", "seconds"),
        Column("mean_gain", "mean gain", "gain"),
    )
    return Table("updates_by_expert", columns, tuple(rows))
