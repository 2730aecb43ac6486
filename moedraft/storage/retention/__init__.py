"""Which records a full buffer keeps, and how many of one client's are learned from."""
