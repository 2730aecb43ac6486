"""Tables with one row for each expert, or for each version of one expert."""

from __future__ import annotations

from collections.abc import Sequence

from moedraft.core import AdapterVersion
from moedraft.insight.change import Change
from moedraft.insight.columns import Requests
from moedraft.insight.tables.figures import FIRST_STEP
from moedraft.insight.tables.table import Column, Kind, Row, Table
from moedraft.insight.views import Expert


def experts_table(experts: tuple[Expert, ...]) -> Table:
    """The figures of each `Expert` in one row. Keys with `all_` are sums since the beginning."""
    columns = (
        Column("expert", "expert", "text"),
        Column("requests", "requests", "count"),
        Column("share", "share of traffic", "share"),
        Column("tokens_per_step", "tokens per target step", "number"),
        Column("recent_tokens_per_step", "now", "number"),
        *_change_columns("tokens_per_step", "number"),
        FIRST_STEP,
        Column("recent_first_step_share", "now", "share"),
        *_change_columns("first_step_share", "gain"),
        Column("acceptance_rate", "accepted of drafted", "share"),
        Column("mean_acceptance_length", "mean length", "number"),
        Column("coverage", "on its list", "share"),
        Column("replay_size", "replay", "count"),
        Column("version", "version", "count"),
        Column("updates", "updates", "count"),
        Column("all_requests", "requests ever", "count"),
        Column("all_tokens", "tokens ever", "count"),
        Column("all_steps", "target steps ever", "count"),
        Column("all_first_guesses", "first guesses looked at, ever", "count"),
        Column("all_right_first_guesses", "of these right, ever", "count"),
        Column("all_drafts", "drafts ever", "count"),
        Column("all_draft_tokens", "drafted ever", "count"),
        Column("all_accepted_tokens", "accepted ever", "count"),
    )
    return Table("experts", columns, tuple(_expert_row(expert) for expert in experts))


def _change_columns(key: str, kind: Kind) -> tuple[Column, ...]:
    """Columns for a difference and the two ends of its 95 % interval."""
    return (
        Column(f"{key}_change", "change", kind),
        Column(f"{key}_change_low", "at least", kind),
        Column(f"{key}_change_high", "at most", kind),
    )


def _expert_row(expert: Expert) -> Row:
    stats = expert.stats
    ever: Row = (0,) * 8
    if stats:
        ever = (
            *(stats.requests, stats.tokens, stats.steps, stats.first_guesses, stats.right_first_guesses),
            *(stats.drafts, stats.draft_tokens, stats.accepted_tokens),
        )
    return (
        *(expert.name, expert.requests, expert.share, expert.tokens_per_step, expert.recent_tokens_per_step),
        *_change_cells(expert.change_of_tokens_per_step),
        *(expert.first_step_share, expert.recent_first_step_share),
        *_change_cells(expert.change_of_first_step_share),
        *(expert.acceptance, expert.mean_acceptance_length),
        expert.coverage.share if expert.coverage else None,
        *(expert.replay_size, expert.version, expert.updates),
        *ever,
    )


def _change_cells(change: Change | None) -> Row:
    return (None,) * 3 if change is None else (change.difference, change.low, change.high)


def versions_table(versions: Sequence[AdapterVersion], requests: Requests, expert: str) -> Table:
    """A table of one expert's versions, newest first, with the figures of each in `requests`.

    `versions` are given oldest first.
    """
    columns = (
        Column("version", "version", "count"),
        Column("state", "state", "text"),
        Column("created_at", "made", "time"),
        Column("parent", "made from", "count"),
        Column("held_out_acceptance", "when made", "share"),
        Column("requests", "requests", "count"),
        Column("tokens_per_step", "tokens per target step", "number"),
        FIRST_STEP,
    )
    rows = tuple(_version_row(version, requests, expert) for version in reversed(versions))
    return Table("versions", columns, rows)


def _version_row(version: AdapterVersion, requests: Requests, expert: str) -> Row:
    own = requests.of(expert)
    served = own.where((own["adapter_version"] == version.version) & (own["num_drafts"] > 0))
    made = (version.version, version.state, version.created_at, version.parent, version.acceptance)
    return (*made, len(served), served.tokens_per_step, served.drafted_by(expert).first_step_share)
