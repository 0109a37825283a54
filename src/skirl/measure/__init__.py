"""Commands that measure: benchmarks and cache sizes."""
