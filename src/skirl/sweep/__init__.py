"""Train several variants of a model on one stream of data, with one plan."""
