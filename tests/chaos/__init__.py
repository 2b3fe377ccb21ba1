"""A fleet under load while its parts are killed, stopped and restarted: `make chaos`, or `python -m tests.chaos`.

workload.py   requests of every kind, what a client is told, and whether that is right
faults.py     the schedule (repeatable by seed) and how each fault is done
campaign.py   both together against `outrider serve`, and what must be true afterwards
census.py     processes, sockets and shared memory
report.py     what was found, as JSON
"""
