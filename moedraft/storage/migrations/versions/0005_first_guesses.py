"""First guesses by who drafted, and each expert's first requests, to measure its change against."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

FIRST = 20

KEPT = sa.text(
    "SELECT num_tokens, num_steps, drafted_at, accepted_at FROM requests WHERE expert = :expert ORDER BY id"
)
FILL = sa.text(
    "UPDATE request_totals SET first_guesses = :guesses, accepted_first_guesses = :accepted, "
    "first_window = :window WHERE expert = :expert"
)


def upgrade() -> None:
    for name in ("shared_drafted_at", "shared_accepted_at"):
        op.add_column("requests", sa.Column(name, sa.JSON, nullable=False, server_default="[]"))
    for name in ("first_guesses", "accepted_first_guesses"):
        op.add_column("request_totals", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    op.add_column("request_totals", sa.Column("first_window", sa.JSON))
    connection = op.get_bind()
    for expert, count in connection.execute(sa.text("SELECT expert, requests FROM request_totals")).all():
        fill(connection, expert, count)


def fill(connection: sa.Connection, expert: str, count: int) -> None:
    """What the kept requests of an expert still tell. Its beginning is known if none was trimmed."""
    rows = [row_of(*row) for row in connection.execute(KEPT, {"expert": expert}).all()]
    known = len(rows) == count
    connection.execute(
        FILL,
        {
            "expert": expert,
            "guesses": sum(row[2] for row in rows),
            "accepted": sum(row[3] for row in rows),
            "window": json.dumps(rows[:FIRST]) if known else None,
        },
    )


def row_of(tokens: int, steps: int, drafted_at: str, accepted_at: str) -> list[int]:
    """Tokens, steps, first guesses, and those accepted; old requests have no counts by position."""
    drafted, accepted = json.loads(drafted_at), json.loads(accepted_at)
    return [tokens, steps, sum(drafted[:1]), sum(accepted[:1])]
