"""Trains the demo pair of target and drafter: `python -m backend.lab.demo`."""
