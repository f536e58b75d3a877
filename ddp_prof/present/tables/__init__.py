"""Makes tables from results."""
