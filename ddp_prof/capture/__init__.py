"""Records a program: builds the profiler's command line, runs the processes, and checks the files. Needs no torch."""
