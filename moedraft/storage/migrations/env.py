"""Alembic's entry point. The transaction is the caller's (`storage.db`), so all migrations happen or none."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
