"""Decides where requests go (`choosing.py`, `affinity.py`), and which move to another verifier (`balance.py`).  Pure."""
