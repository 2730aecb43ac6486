"""The tables of a home as they are now. Migrations never import this; a test checks that the two agree."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData()


def _counts(*names: str) -> list[Column[int]]:
    return [Column(name, Integer, nullable=False, server_default="0") for name in names]


meta = Table(
    "meta",
    metadata,
    Column("key", String(128), primary_key=True),
    Column("value", Text, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Integer, nullable=False),
)

# One row for every name that ever had adapters, "shared" included. It outlives the domain, so that a
# version number is never given twice, not even to a domain removed and registered again.
experts = Table(
    "experts",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("last_version", Integer, nullable=False),
    Column("updates", Integer, nullable=False),
)

domains = Table(
    "domains",
    metadata,
    Column("name", String(64), ForeignKey("experts.name"), primary_key=True),
    Column("description", Text, nullable=False),
    Column("examples", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)

adapter_versions = Table(
    "adapter_versions",
    metadata,
    Column("domain", String(64), ForeignKey("experts.name"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("parent", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("base_hash", String(128), nullable=False),
    Column("acceptance", Float),
    Column("created_at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("stood_on", Integer),  # an expert's: the version of the shared adapter that it was trained on
    Column("last_record", Integer, nullable=False, server_default="0"),  # newest replay id at its publication
)
_is_live = text("state = 'live'")
Index(
    "one_live_version",
    adapter_versions.c.domain,
    unique=True,
    sqlite_where=_is_live,
    postgresql_where=_is_live,
)

# Eviction reads the columns before the payload, and the two behind it from an index, so that it never
# touches the payload's overflow pages.
replay = Table(
    "replay",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("domain", String(64), ForeignKey("experts.name"), nullable=False),
    Column("expert", String(64), nullable=False),
    Column("adapter_version", Integer, nullable=False),
    Column("target_id", Text, nullable=False),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("drafted", Integer, nullable=False),
    Column("accepted", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("draw", Float, nullable=False),  # uniform in [0, 1): the reservoir keeps the smallest
    Column("payload", LargeBinary, nullable=False),
    Column("source", String(64), nullable=False, server_default=""),  # the id of a key, or ""
    Column("pinned", Boolean, nullable=False, server_default="0"),  # the client chose the domain
    # JSON: how the drafts stood at the end, with the router's prior and without; null: they were not compared
    Column("weights", Text),
    Column("heard", Text),
    Column("prompt", BigInteger),  # a hash of the prompt's tokens; null in records from before version 14
    Column("held_out", Boolean),  # never trained on; null in records from before version 17
    Column("temperature", Float, nullable=False, server_default="0"),  # 0 too where it was not stored yet
    sqlite_autoincrement=True,  # ids are never reused, so "newer than id" stays true after a purge
)
Index("replay_by_domain", replay.c.domain, replay.c.id)
_of_source = (replay.c.domain, replay.c.source)
Index("replay_by_source", *_of_source, replay.c.pinned, replay.c.id)
Index("replay_by_prompt", *_of_source, replay.c.prompt, replay.c.id, replay.c.pinned)
Index("replay_by_side", replay.c.domain, replay.c.held_out, replay.c.prompt)
Index("replay_sides", replay.c.prompt, replay.c.held_out)
_where_heard: dict[str, Any] = dict.fromkeys(("sqlite_where", "postgresql_where"), text("heard IS NOT NULL"))
Index("replay_heard", replay.c.id, replay.c.source, replay.c.heard, **_where_heard)

# What a feature drafter read of the target at a record's positions; it goes when its record does.
replay_states = Table(
    "replay_states",
    metadata,
    Column("record", Integer, ForeignKey("replay.id", ondelete="CASCADE"), primary_key=True),
    Column("base_hash", String(128), nullable=False),
    Column("size", Integer, nullable=False),  # bytes of the payload
    Column("payload", LargeBinary, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("request_id", String(128), nullable=False),
    Column("expert", String(64), nullable=False),
    Column("adapter_version", Integer, nullable=False),
    Column("lang", String(64), nullable=False),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("num_tokens", Integer, nullable=False),
    Column("num_steps", Integer, nullable=False),
    Column("num_drafts", Integer, nullable=False),
    Column("num_draft_tokens", Integer, nullable=False),
    Column("num_accepted_tokens", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("confidence", Float),
    Column("time_to_first_token", Float),
    Column("drafted_at", JSON, nullable=False, server_default="[]"),
    Column("accepted_at", JSON, nullable=False, server_default="[]"),
    Column("shared_drafted_at", JSON, nullable=False, server_default="[]"),
    Column("shared_accepted_at", JSON, nullable=False, server_default="[]"),
    Column("overruled", Boolean, nullable=False, server_default="0"),
    Column("overruled_tokens", Integer, nullable=False, server_default="0"),
    Column("overruled_gain", Float, nullable=False, server_default="0"),
    *_counts("first_guesses", "right_first_guesses", "shared_first_guesses", "shared_right_first_guesses"),
    *_counts("num_lookup_tokens", "num_accepted_lookup_tokens"),
    *_counts("num_earlier_tokens", "num_accepted_earlier_tokens"),  # of these, from earlier answers
    sqlite_autoincrement=True,
)
Index("requests_by_expert", requests.c.expert, requests.c.id)
Index("requests_by_time", requests.c.created_at)

updates = Table(
    "updates",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("expert", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("records", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("loss", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("acceptance_before", Float),
    Column("acceptance_after", Float),
    Column("created_at", Float, nullable=False),
    Column("decision", String(16)),  # the gate's, with what it measured; null where there was no gate
    *(Column(name, Float) for name in ("gain", "gain_low", "gain_high")),
    Column("gate_records", Integer),
    Column("parent", Integer),
    Column("stood_on", Integer),
    Column("static_gain", Float),  # over the untrained draft
    Column("reason", Text),
    Column("witness", Float),  # probability that the right tokens became more probable
    sqlite_autoincrement=True,
)

# Sums over all requests of an expert, those already trimmed from `requests` included. `first_window` holds
# [tokens, steps, first guesses looked at, those right] of each of the first requests; null where these were
# trimmed before it was kept.
request_totals = Table(
    "request_totals",
    metadata,
    Column("expert", String(64), primary_key=True),
    Column("requests", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("drafts", Integer, nullable=False),
    Column("draft_tokens", Integer, nullable=False),
    Column("accepted_tokens", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("first_requests", Integer, nullable=False),
    Column("first_draft_tokens", Integer, nullable=False),
    Column("first_accepted_tokens", Integer, nullable=False),
    *_counts("lookup_tokens", "accepted_lookup_tokens", "earlier_tokens", "accepted_earlier_tokens"),
    *_counts("first_guesses", "right_first_guesses"),
    Column("first_window", JSON(none_as_null=True)),
)
