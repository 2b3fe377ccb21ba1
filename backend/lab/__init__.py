"""The laboratory: benchmarks, and the training of heads and of the demo models.  Nothing that serves imports it."""
