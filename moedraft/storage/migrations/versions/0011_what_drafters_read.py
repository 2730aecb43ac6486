"""What a feature drafter read of the target at a record's positions; it goes when its record does."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "replay_states",
        sa.Column("record", sa.Integer, sa.ForeignKey("replay.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("base_hash", sa.String(128), nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
