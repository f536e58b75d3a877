"""The critical path of a step over all ranks: what it waited for, followed backwards from its end."""
