"""First schema: domains, adapter versions, replay, request statistics."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _registry_tables()
    _version_table()
    _replay_table()
    _request_tables()
    op.execute("INSERT INTO experts (name, last_version, updates) VALUES ('shared', 0, 0)")
    op.execute("INSERT INTO counters (name, value) VALUES ('generation', 0)")


def _registry_tables() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String(128), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
    )
    op.create_table(
        "experts",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("last_version", sa.Integer, nullable=False),
        sa.Column("updates", sa.Integer, nullable=False),
    )
    op.create_table(
        "domains",
        sa.Column("name", sa.String(64), sa.ForeignKey("experts.name"), primary_key=True),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("examples", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )


def _version_table() -> None:
    op.create_table(
        "adapter_versions",
        sa.Column("domain", sa.String(64), sa.ForeignKey("experts.name"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("base_hash", sa.String(128), nullable=False),
        sa.Column("acceptance", sa.Float),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
    )
    is_live = sa.text("state = 'live'")
    op.create_index(
        "one_live_version",
        "adapter_versions",
        ["domain"],
        unique=True,
        sqlite_where=is_live,
        postgresql_where=is_live,
    )


def _replay_table() -> None:
    op.create_table(
        "replay",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("domain", sa.String(64), sa.ForeignKey("experts.name"), nullable=False),
        sa.Column("expert", sa.String(64), nullable=False),
        sa.Column("adapter_version", sa.Integer, nullable=False),
        sa.Column("target_id", sa.Text, nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer, nullable=False),
        sa.Column("drafted", sa.Integer, nullable=False),
        sa.Column("accepted", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("draw", sa.Float, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("replay_by_domain", "replay", ["domain", "id"])


def _request_tables() -> None:
    op.create_table(
        "requests",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("expert", sa.String(64), nullable=False),
        sa.Column("adapter_version", sa.Integer, nullable=False),
        sa.Column("lang", sa.String(64), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("num_steps", sa.Integer, nullable=False),
        sa.Column("num_drafts", sa.Integer, nullable=False),
        sa.Column("num_draft_tokens", sa.Integer, nullable=False),
        sa.Column("num_accepted_tokens", sa.Integer, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("requests_by_expert", "requests", ["expert", "id"])
    op.create_table(
        "request_totals",
        sa.Column("expert", sa.String(64), primary_key=True),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("drafts", sa.Integer, nullable=False),
        sa.Column("draft_tokens", sa.Integer, nullable=False),
        sa.Column("accepted_tokens", sa.Integer, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("first_requests", sa.Integer, nullable=False),
        sa.Column("first_draft_tokens", sa.Integer, nullable=False),
        sa.Column("first_accepted_tokens", sa.Integer, nullable=False),
    )
