"""Drafters that learn from live traffic: the ring of replayed sequences, the trainer, and when a new head is published."""
