"""The ranks of a run: how they are started, where each stands, whom it talks to."""
