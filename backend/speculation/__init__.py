"""Decides at every step what to draft, what to verify and how long to wait, from measured times and chances.  Pure."""
