"""Traces to frozen results: pure functions on columns."""
