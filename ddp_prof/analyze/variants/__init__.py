"""What one variant changes in the step against another."""
