"""Memory of a sweep: what fits by turns, by making things again, by moving them away, and half a step apart."""
