"""Smaller benchmarks, each a program: `python -m backend.lab.experiments.NAME`."""
