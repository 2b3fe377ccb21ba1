"""vLLM, and all that depends on its insides.  No other package imports it.

The core (`build.py`, `scheduler.py`, `runner.py`, `sampling.py`, `worker.py`) lives in a verifier, `front/` in a gateway.
"""
