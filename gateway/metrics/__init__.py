"""What /metrics exports."""
