"""Structural findings: what in the set-up of a job keeps its communication from hiding, with evidence and advice."""
