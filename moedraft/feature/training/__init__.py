"""Makes a feature drafter for a target: what it answers and computes, and what is learned from that."""
