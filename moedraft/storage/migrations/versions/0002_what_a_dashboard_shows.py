"""Router confidence, time to first token and acceptance by position of requests; a log of updates."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("requests", sa.Column("confidence", sa.Float))
    op.add_column("requests", sa.Column("time_to_first_token", sa.Float))
    op.add_column("requests", sa.Column("drafted_at", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("requests", sa.Column("accepted_at", sa.JSON, nullable=False, server_default="[]"))
    op.create_index("requests_by_time", "requests", ["created_at"])
    op.create_table(
        "updates",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("expert", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("records", sa.Integer, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("loss", sa.Float, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("acceptance_before", sa.Float),
        sa.Column("acceptance_after", sa.Float),
        sa.Column("created_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
