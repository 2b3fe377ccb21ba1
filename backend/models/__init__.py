"""Models on disk: finds and checks them (`resolve.py`), reads configurations and weights; has the built-in pair (`demo/`)."""
