"""Load tests of a gateway from the outside: HTTP and server-sent events only, timed at the client.

`python -m loadtest` (and `make load`) runs one scenario.  It starts a fleet or uses a running one, loads it with Locust in a
process of its own, and writes a report.  Nothing here imports the gateway or the backend, so that it measures what any client
would see.
"""
