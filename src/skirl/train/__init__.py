"""The commands that train and check a run, and what surrounds a loop."""
