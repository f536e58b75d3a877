"""Records a program: the recorder's command line, the processes, and what must have arrived. Needs no torch."""
