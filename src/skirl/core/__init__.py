"""The nouns: tables, batches, keys, optimizers, first values; and the plain reference that fixes every bit."""
