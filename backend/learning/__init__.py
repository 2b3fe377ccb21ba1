"""How drafters learn from live traffic: the replay ring of sequences, the trainer, and the rules for publishing a new head."""
