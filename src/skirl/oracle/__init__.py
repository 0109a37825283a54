"""The oracle: keys of the coming batches in, Steps out. It is pure: no torch, no clock. In reading order: `step` (the
result), `planner` (all banks), `bank` (one bank, the heart), `loops` (its kernels), `row_states`, `seen`,
`policies`."""
