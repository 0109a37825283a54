"""The benchmarks: each is a dataclass of its flags whose `run()` measures and returns what the JSON line holds."""
