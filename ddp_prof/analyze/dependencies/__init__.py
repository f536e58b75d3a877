"""Who waited for whom: recorded dependency edges, and what they say of communication."""
