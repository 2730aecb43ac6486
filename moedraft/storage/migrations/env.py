"""Alembic's entry point: runs inside the transaction that `storage.db` has opened, or not at all."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], transactional_ddl=True, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
