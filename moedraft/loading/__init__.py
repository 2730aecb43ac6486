"""What loading a model takes beside transformers: checks, its hash, and the precision that suits a CPU."""
