"""Traces to frozen results: pure functions on columns."""

DEFINITIONS = 2
"""Version of what the figures of a step mean; a store of figures holds the one that they follow. Raise it with every
change that gives another figure for the same capture, as when the tail was limited to what is exposed (2)."""
