"""Measure how much of a data-parallel training step's communication hides behind computation."""

__version__ = "0.1.0"
