"""The tables that pages, plots and CSV files show, and the spans of time that they cover."""
