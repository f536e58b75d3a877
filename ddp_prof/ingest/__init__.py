"""Files to traces: one reader a format."""
