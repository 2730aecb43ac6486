"""What the demo and the benchmark share: shipped prompts, measurements, a served stream, a report."""
