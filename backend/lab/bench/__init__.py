"""`outrider bench`: every mode on the same cores in one run.  The parent measures through the engine wire; children compute.

Reading order: `plan.py` says which configurations run where and when, `worker.py` is each of them, `measure.py` turns counters
into rows, `run.py` is the loop, `tables.py` and `plot.py` write what was found.  Importing this package imports nothing else.
"""
