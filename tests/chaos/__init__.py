"""A fleet under load while its parts are killed, stopped and restarted: `make chaos`, or `python -m tests.chaos`.

workload.py   requests of every kind, what a client is told, and whether that is right
faults.py     the schedule (repeatable by seed) and how each fault is done
campaign.py   both together against `outrider serve`, what must be true afterwards, and what was found, as JSON
"""
