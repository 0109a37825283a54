"""Files that a run leaves behind, and ways to look at them."""
