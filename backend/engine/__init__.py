"""All code that uses vLLM.  No other package imports vLLM.

The core (`build.py`, `scheduler.py`, `runner.py`, `sampling.py`, `worker.py`) runs in a verifier, `front/` in a gateway.
"""
