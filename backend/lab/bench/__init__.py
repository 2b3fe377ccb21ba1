"""`outrider bench`: measures every mode on the same cores in one run.

The parent process measures through the engine wire; child processes are the verifiers and drafters.  Reading order: `plan.py`
decides which configurations run, on which cores and when; `children.py` has the child processes; `measure.py` turns counters
into rows; `run.py` is the loop; `tables.py` and `plot.py` write the results.  Importing this package imports nothing else.
"""
