"""Compare runs: by how much variants change the step and its parts, and whether a run meets requirements."""
