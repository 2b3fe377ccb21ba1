"""Rollouts from traces: what a batch of prompts over all verifiers is made of, and a row of every step for analysis.

`trace.py` reads the prompts, `gateway/rollout` runs them, `tables.py` and `report.py` write the results.
"""
