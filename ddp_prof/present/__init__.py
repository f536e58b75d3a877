"""Presents results: tables, charts, timelines, pages. Only here do nanoseconds become milliseconds."""
