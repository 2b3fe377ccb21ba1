"""The drafter: proposes tokens for verifiers elsewhere, from an EAGLE head or by prompt lookup.

`actor.py` is its Ray side, `process.py` the process's threads, `loop.py` the socket loop, `service.py` the protocol, and
`eagle.py` and `ngram.py` are the two ways to propose.
"""
