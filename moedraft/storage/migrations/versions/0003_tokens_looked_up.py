"""Draft tokens that were looked up in the text: of each request and of each expert."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for table, prefix in (("requests", "num_"), ("request_totals", "")):
        for name in ("lookup_tokens", "accepted_lookup_tokens"):
            op.add_column(table, sa.Column(prefix + name, sa.Integer, nullable=False, server_default="0"))
