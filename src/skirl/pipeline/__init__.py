"""The path of a batch from the user's loader to the training loop."""
