"""The laboratory: benchmarks, the fleet simulator, and the training of the demo pair.  Nothing that serves imports it."""
