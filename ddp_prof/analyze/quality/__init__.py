"""What a trace holds, and what it does not let one say."""
