"""A fleet on paper: the coordinator's own policy, driven by events instead of by members (`outrider simulate`)."""
