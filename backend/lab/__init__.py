"""What measures and makes, and never serves: benchmarks, the simulator, the training of the demo pair."""
