"""Measure what theodolite costs: `python -m benchmarks [NAME …]`."""
