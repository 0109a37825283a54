"""Commands that measure: benchmarks, cache sizes, scaling, and a look at files."""
