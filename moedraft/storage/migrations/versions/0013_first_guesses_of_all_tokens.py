"""First guesses are counted on tokens of whole answers, no longer on rounds in which something was drafted.

What was counted before depends on the draft lengths and cannot be compared with it, so counting begins anew.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

NAMES = ("first_guesses", "right_first_guesses", "shared_first_guesses", "shared_right_first_guesses")


def upgrade() -> None:
    for name in NAMES:
        op.add_column("requests", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    op.execute("ALTER TABLE request_totals RENAME COLUMN accepted_first_guesses TO right_first_guesses")
    op.execute("UPDATE request_totals SET first_guesses = 0, right_first_guesses = 0")
    connection = op.get_bind()
    windows = connection.execute(sa.text("SELECT expert, first_window FROM request_totals")).all()
    store = sa.text("UPDATE request_totals SET first_window = :window WHERE expert = :expert")
    for expert, window in windows:
        if window is not None and (rows := json.loads(window)) is not None:
            found = json.dumps([[tokens, steps, 0, 0] for tokens, steps, *_ in rows])
            connection.execute(store, {"expert": expert, "window": found})
