"""Whether evidence put another expert in the place of the one that the router had chosen, by request."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("requests", sa.Column("overruled", sa.Boolean, nullable=False, server_default="0"))
