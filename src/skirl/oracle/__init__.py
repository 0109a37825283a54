"""The oracle: keys of the coming batches in, Steps out. Pure: no I/O, no torch, no clock.

In reading order: `step` (what comes out), `planner` (all banks, how far to read ahead), `plan` (one bank, the heart),
`entries` and `seen` (what is known of rows), `minimum` (Belady's rule), and `lru`, `lfu`, `ttl` for comparison.
"""
