"""The commands that train and check a run, and everything around the training loop."""
