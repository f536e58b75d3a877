"""What the variants are made of: buckets, gradients in them, the collectives that reduce them."""
