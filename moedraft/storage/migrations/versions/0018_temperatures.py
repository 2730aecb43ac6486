"""Of replay records: the temperature at which the answer was sampled; 0 for greedy ones and older records."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("replay", sa.Column("temperature", sa.Float, nullable=False, server_default="0"))
