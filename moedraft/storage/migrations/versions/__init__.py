"""One module per schema version, in order."""
