"""A Llama-like model's forward on a CPU, for models whose weights do not stay in its caches."""
