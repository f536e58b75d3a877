"""Files to traces: one reader per format."""
