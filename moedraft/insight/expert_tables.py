"""Tables with one row for each expert, or for each version of one expert."""

from __future__ import annotations

from collections.abc import Sequence

from moedraft.core import AdapterVersion
from moedraft.insight.columns import Requests
from moedraft.insight.table import Column, Row, Table
from moedraft.insight.views import Expert


def experts_table(experts: tuple[Expert, ...]) -> Table:
    """The figures of each `Expert` in one row. Keys with `all_` are sums since the beginning."""
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
    return Table("experts", columns, tuple(_expert_row(expert) for expert in experts))


def _expert_row(expert: Expert) -> Row:
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


def versions_table(versions: Sequence[AdapterVersion], requests: Requests) -> Table:
    """A table of one expert's versions, newest first, with the acceptance of each in `requests`.

    `versions` are given oldest first.
    """
    columns = (
        Column("version", "version", "count"),
        Column("state", "state", "text"),
        Column("created_at", "made", "time"),
        Column("parent", "made from", "count"),
        Column("held_out_acceptance", "when made", "share"),
        Column("requests", "requests", "count"),
        Column("acceptance_rate", "in traffic", "share"),
    )
    rows = tuple(_version_row(version, requests) for version in reversed(versions))
    return Table("versions", columns, rows)


def _version_row(version: AdapterVersion, requests: Requests) -> Row:
    drafted = (requests["adapter_version"] == version.version) & (requests["num_drafts"] > 0)
    served = requests.where(drafted)
    made = (version.version, version.state, version.created_at, version.parent, version.acceptance)
    return (*made, len(served), served.acceptance)
