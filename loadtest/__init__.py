"""Load tests of a gateway, from the outside: HTTP and server-sent events only, timed at the client.

`python -m loadtest` (and `make load`) runs one scenario: it starts a fleet, or takes one that runs, drives it with Locust in a
process of its own, and leaves a report.  Nothing here imports the gateway or the backend: what is measured is what any client
would see.
"""
