"""Of replay records: the client whose request left it, and whether that client chose the domain."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("replay", sa.Column("source", sa.String(64), nullable=False, server_default=""))
    op.add_column("replay", sa.Column("pinned", sa.Boolean, nullable=False, server_default="0"))
    # The columns lie behind the payload; the index has them where its overflow pages need not be read.
    op.create_index("replay_by_source", "replay", ["domain", "source", "pinned", "id"])
