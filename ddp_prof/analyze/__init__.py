"""Pure functions that turn traces into frozen results."""

DEFINITIONS = 2
"""Version of the definitions of a step's figures; a store of figures records the version. Increase it with every change
after which a capture gives other figures (2: the tail is limited to exposed communication)."""
