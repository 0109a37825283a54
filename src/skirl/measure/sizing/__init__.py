"""Find the cache size that data needs: survey the ids, run the planner over them, and advise."""
