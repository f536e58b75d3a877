"""The all-reduce measured alone: latency and bandwidth by message size and number of ranks."""
