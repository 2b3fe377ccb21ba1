"""What to draft, verify and wait for, decided at every step from what was measured.  Pure."""
