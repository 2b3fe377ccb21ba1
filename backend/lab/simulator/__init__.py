"""Simulates a fleet: the coordinator's real policy, driven by simulated members (`outrider simulate`)."""
