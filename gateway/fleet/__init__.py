"""The fleet as the gateway sees it: verifiers, running sequences, failover and balancing."""
