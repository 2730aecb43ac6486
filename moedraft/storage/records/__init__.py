"""The records of answered requests, from which experts learn: rows, what they hold, whose they are."""
