"""The benchmarks run in small, and their reports have the fields that others read."""
