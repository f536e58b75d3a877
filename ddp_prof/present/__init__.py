"""Results to something to look at. The only place where nanoseconds become milliseconds."""
