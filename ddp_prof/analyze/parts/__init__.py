"""What is measured of the parts of a capture, put together: the same integers as of the whole."""
