"""Rollouts from traces: runs a batch of prompts over all verifiers, and writes a row of every step for analysis.

`trace.py` reads the prompts, `dispatch.py` decides which verifier runs each request, `run.py` runs them, `tables.py` and
`report.py` write the results.
"""
