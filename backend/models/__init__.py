"""Models on disk: found and checked (`resolve.py`), their configurations and weights read; and the built-in pair (`demo/`)."""
