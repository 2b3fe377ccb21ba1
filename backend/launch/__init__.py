"""Starts and stops a fleet: the launcher's process.

`plan.py` decides which member gets which cores and GPUs, `cluster.py` owns the Ray cluster, `fleet.py` starts the actors and
waits for them, `state.py` keeps the files by which other commands find a running fleet.
"""
