"""Starting and stopping a fleet: the launcher's process.

`plan.py` decides who runs where, `cluster.py` owns the Ray cluster, `fleet.py` starts the actors and waits for them, `state.py`
keeps the files by which other commands find a running fleet.
"""
