"""The benchmark suite: sweeps over settings and writes what it measures into the results database."""
