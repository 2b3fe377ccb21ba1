"""A fleet under load while its parts are killed, stopped and restarted: `make chaos`, or `python -m tests.chaos`.

workload.py   requests of every kind, what a client is told, and whether that is right
faults.py     the faults, in an order that a seed repeats, and how each is done
__main__.py   both together against `outrider serve`, what must be true afterwards, and what was found, as JSON
"""
