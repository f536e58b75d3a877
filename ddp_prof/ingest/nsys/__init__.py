"""Reads what Nsight Systems recorded."""
