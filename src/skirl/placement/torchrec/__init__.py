"""Tables over ranks for TorchRec: reading its models, making and reading its plans. It is imported on first use."""
