"""Smaller benchmarks, each a program: `python -m backend.lab.experiments.NAME`.  `comparing.py` is the frame of most."""
