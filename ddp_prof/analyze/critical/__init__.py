"""What a step waited for from its end backwards: its critical path, over all ranks."""
