"""The drafter: proposes tokens for remote verifiers, from an EAGLE head, a draft model or by prompt lookup.

`actor.py` is its Ray side, `process.py` the process's threads, `loop.py` the socket loop, `service.py` the protocol, and
`eagle.py` (EAGLE heads and draft models), `dflash.py` and `ngram.py` are the ways to propose.
"""
