"""From files to runs: the one loader, for programs, notebooks and the command line."""
