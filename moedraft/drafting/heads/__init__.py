"""Output rows of a feature drafter's experts: each has tokens of its own."""
