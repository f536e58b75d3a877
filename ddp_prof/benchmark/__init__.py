"""The benchmark study: a sweep over settings, its database, and what its numbers support saying."""
