"""Of replay records: how the drafts stood when the answer ended, with the router's prior and without."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("replay", sa.Column("weights", sa.Text))
    op.add_column("replay", sa.Column("heard", sa.Text))
    # Few columns of few records: who looks for labels need not read the payloads in between.
    heard = sa.text("heard IS NOT NULL")
    op.create_index(
        "replay_heard", "replay", ["id", "source", "heard"], sqlite_where=heard, postgresql_where=heard
    )
