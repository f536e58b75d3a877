"""Tries other settings on a program that knows nothing of us, in turns with today's, and says what they gain."""
