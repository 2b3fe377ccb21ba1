"""`outrider rollout`: runs the requests of `backend/rollout` over a fleet with the gateway's core, and gathers their rows."""
