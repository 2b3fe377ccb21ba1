"""Decides where requests go (`routers.py`, `affinity.py`), and which move to another verifier (`balance.py`).  Pure."""
