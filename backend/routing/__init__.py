"""Decides which verifier a request goes to (`routers.py`, `affinity.py`), and which running requests move (`balance.py`).

Pure.
"""
