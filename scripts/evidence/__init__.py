"""Evidence that online learning of experts pays and does no harm; `scripts/evidence.py` runs it."""
