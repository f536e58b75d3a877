"""Captures that are larger than the memory: read part by part, each of which is a small capture of its own."""
