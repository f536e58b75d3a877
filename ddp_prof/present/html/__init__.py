"""HTML pages that work offline."""
