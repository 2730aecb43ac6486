"""Alembic's migrations of a home. Append-only: a released version is never edited."""
