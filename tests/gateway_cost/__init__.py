"""`make bench-gateway`: what a front process costs per chunk and per request, beside vLLM's own API server.

Both serve from verifiers of the same program (`engine.py`), which emit ready-made tokens at a given pace.  The front process
has one core, verifiers and clients (`load.py`) have the other.  CPU time is the kernel's, for the whole front process.  A
token's text tells its clients when it was emitted: the added latency is what lies between that and its arrival.
"""
