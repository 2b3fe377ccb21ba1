"""What a verifier did, row by row: per step, per verification, per request and per decision of mode `auto`."""
