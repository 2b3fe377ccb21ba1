"""Which verifier takes a request (`routers.py`, `affinity.py`), and which requests move to another (`balance.py`).  Pure."""
