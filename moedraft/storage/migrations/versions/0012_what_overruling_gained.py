"""How the draft that evidence chose guessed beside the router's, by request."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    for name, kind in (("overruled_tokens", sa.Integer), ("overruled_gain", sa.Float)):
        op.add_column("requests", sa.Column(name, kind, nullable=False, server_default="0"))
