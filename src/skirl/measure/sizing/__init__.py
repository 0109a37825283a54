"""Finds the cache size that data needs: surveys the ids, runs the planner over them, and advises."""
