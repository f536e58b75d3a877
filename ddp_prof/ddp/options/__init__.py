"""What ``bucketed`` can do besides: reducers that send or use gradients in another way."""
