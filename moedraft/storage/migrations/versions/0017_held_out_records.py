"""Of replay records: whether they are held out, which is decided when they are stored.

Of records that are there already it depends on their prompt alone, as it did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("replay", sa.Column("held_out", sa.Boolean))
    op.create_index("replay_by_side", "replay", ["domain", "held_out", "prompt"])
    op.create_index("replay_sides", "replay", ["prompt", "held_out"])
