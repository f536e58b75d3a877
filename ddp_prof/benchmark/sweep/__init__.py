"""Runs every variant in every setting and writes what it measures into the results database."""
