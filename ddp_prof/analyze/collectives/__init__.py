"""Each collective: when it ran on each rank, why it is exposed, who arrived last."""
