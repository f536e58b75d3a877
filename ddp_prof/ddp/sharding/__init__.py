"""Variants that divide state among the ranks instead of keeping all of it on each."""
