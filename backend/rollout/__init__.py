"""Rollouts from traces: a batch of prompts over all verifiers, with a row of every step for analysis.

`trace.py` reads what to run, `dispatch.py` decides who runs it, `run.py` runs it, `tables.py` and `report.py`
say what came of it.
"""
