"""Benchmarks that run from a checkout; ``fp8kit bench`` is the packaged one. Results with versions stand
under ``results/``."""
