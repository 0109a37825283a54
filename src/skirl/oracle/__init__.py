"""The oracle: keys of the coming batches in, Steps out. Pure: no I/O, no torch, no clock.

In reading order: `step` (what comes out), `planner` (all banks, how far to read ahead), `bank` (one bank, the heart),
`loops` (its kernels), `row_states`, `uses` and `seen` (what is known of rows), `policies` (which rows leave).
"""
