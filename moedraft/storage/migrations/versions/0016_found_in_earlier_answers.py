"""Draft tokens that were looked up in earlier answers: of each request and of each expert.

They are counted among those that were looked up. Older requests have none, also where some were.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    for table, prefix in (("requests", "num_"), ("request_totals", "")):
        for name in ("earlier_tokens", "accepted_earlier_tokens"):
            op.add_column(table, sa.Column(prefix + name, sa.Integer, nullable=False, server_default="0"))
