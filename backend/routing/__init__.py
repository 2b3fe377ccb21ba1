"""Decides where requests go (`choosing.py`), and which move to another verifier (`balance.py`).  Pure."""
