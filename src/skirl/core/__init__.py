"""The basic types (tables, batches, keys, optimizers, initial values), and the reference that defines every bit."""
