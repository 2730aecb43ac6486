"""Of adapter versions: the newest replay record at their publication, whatever the clock said since."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

FILL = """
UPDATE adapter_versions SET last_record = coalesce(
    (SELECT max(id) FROM replay WHERE replay.created_at <= adapter_versions.created_at), 0)
"""


def upgrade() -> None:
    op.add_column(
        "adapter_versions", sa.Column("last_record", sa.Integer, nullable=False, server_default="0")
    )
    op.execute(FILL)
