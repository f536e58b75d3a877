"""The study's tables, figures and written analysis."""
