"""Of updates: what the gate decided and its figures, the parent version, and the shared adapter used."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("updates", sa.Column("decision", sa.String(16)))
    for name in ("gain", "gain_low", "gain_high"):
        op.add_column("updates", sa.Column(name, sa.Float))
    for name in ("gate_records", "parent", "stood_on"):
        op.add_column("updates", sa.Column(name, sa.Integer))
