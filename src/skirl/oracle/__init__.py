"""The oracle: keys of the coming batches in, Steps out. It is pure: no I/O, no torch, no clock. In reading order: `step`
(the result), `planner` (all banks, how far to read ahead), `bank` (one bank, the heart), `loops` (its kernels),
`row_states`, `uses` and `seen` (what is known of rows), `policies` (which rows leave)."""
