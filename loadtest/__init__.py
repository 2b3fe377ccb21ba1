"""Load tests of a gateway from the outside: HTTP and server-sent events only, timed at the client.

`make load` runs Locust on `locustfile.py`.  Nothing here imports the gateway or the backend, so that it measures what any
client would see.
"""
