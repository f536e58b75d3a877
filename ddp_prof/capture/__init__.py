"""Records a program: the recorder's command line, the processes, and a check of the files. Needs no torch."""
