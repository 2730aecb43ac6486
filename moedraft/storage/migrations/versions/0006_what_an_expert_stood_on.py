"""The shared adapter that a version was trained on; the gain of updates over no adapter, and the reason."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

# What the log of updates says or, of an older version, the shared adapter that was the newest by then.
FILL = """
UPDATE adapter_versions SET stood_on = coalesce(
    (SELECT stood_on FROM updates WHERE updates.expert = adapter_versions.domain
        AND updates.version = adapter_versions.version AND updates.version != updates.parent
        ORDER BY id DESC LIMIT 1),
    (SELECT max(version) FROM adapter_versions AS shared WHERE shared.domain = 'shared'
        AND shared.base_hash = adapter_versions.base_hash
        AND shared.created_at <= adapter_versions.created_at),
    0)
WHERE domain != 'shared'
"""


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("stood_on", sa.Integer))
    op.add_column("updates", sa.Column("static_gain", sa.Float))
    op.add_column("updates", sa.Column("reason", sa.Text))
    op.execute(FILL)
