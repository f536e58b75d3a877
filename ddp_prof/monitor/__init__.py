"""Analyze the traces that ``annotate.Monitor`` records while a job trains, and read the log of the results."""
