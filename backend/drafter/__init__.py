"""The drafter: proposes tokens for remote verifiers, from an EAGLE head, a draft model or by prompt lookup.

`actor.py` is its Ray side, `process.py` the process's threads, `loop.py` the socket loop, `service.py` the protocol, and
`eagle.py`, `draft_model.py` and `ngram.py` are the three ways to propose.
"""
