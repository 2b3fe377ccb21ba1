"""The laboratory: benchmarks and the training of the demo pair.  Nothing that serves imports it."""
