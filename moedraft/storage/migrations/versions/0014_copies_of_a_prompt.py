"""Of replay records: a hash of the prompt, so that copies of one prompt are told.

Records that are there already have none and count as different prompts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("replay", sa.Column("prompt", sa.BigInteger))
    # The column lies behind the payload; the index has it where its overflow pages need not be read.
    op.create_index("replay_by_prompt", "replay", ["domain", "source", "prompt", "id", "pinned"])
