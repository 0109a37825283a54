"""Many processes on one machine, started and watched together."""
