"""Which rows leave the cache, one policy a file."""
