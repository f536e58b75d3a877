"""What ran when: a picture and an interactive page."""
