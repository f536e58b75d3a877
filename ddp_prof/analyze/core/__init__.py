"""Events of a rank with their steps and phases, and the algebra of intervals that everything is measured with."""
