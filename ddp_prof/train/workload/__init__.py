"""What is computed: the model, its sizes and data, a training step."""
