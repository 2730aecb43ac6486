"""The versions of adapters: their files, their rows, and how candidates become live."""
