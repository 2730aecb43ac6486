"""Feature drafters: a layer that reads what the target computes anyway, after EAGLE-3 (arXiv 2503.01840)."""
