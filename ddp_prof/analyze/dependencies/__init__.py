"""Recorded dependency edges between operations, and what they show about communication."""
