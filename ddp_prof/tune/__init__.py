"""Tries other settings on an unchanged program, in turns with its present settings, and says what they gain.

*Today's settings* are those that the program has now. A *try* is a set of other settings. A *round* runs the program
once with today's settings and once with each try that is not decided yet. A *pair* is the two step times, with today's
settings and with a try, of one round.
"""
