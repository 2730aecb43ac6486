"""Of updates: how probable it is that the right tokens became more probable, by which the gate decides too.

Null for older updates, and where it was not judged.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("updates", sa.Column("witness", sa.Float))
