"""How much communication hides, by rank and step, compared between runs and held against limits."""
