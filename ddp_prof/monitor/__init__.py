"""Analyses what ``annotate.Monitor`` records while a job trains, and reads its log."""
