"""The benchmark study: a sweep over settings, its database, and the differences that are statistically supported."""
