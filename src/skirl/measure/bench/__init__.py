"""The benchmarks: each a dataclass of its flags, with `run()` that measures and returns what one JSON line says."""
