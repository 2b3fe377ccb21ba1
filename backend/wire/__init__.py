"""What travels between processes: between verifiers and drafters (`drafting.py`), gateways and verifiers (`engine.py`)."""
