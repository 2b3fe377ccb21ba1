"""API keys: who calls, what each key may use, and how much."""
