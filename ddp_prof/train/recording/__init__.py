"""What is kept of a run: captures, memory, messages, its ``run.json``."""
