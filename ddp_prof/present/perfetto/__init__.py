"""Traces for Perfetto and chrome://tracing."""
