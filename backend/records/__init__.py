"""Records of what a verifier did: one row per step, per verification, per request and per decision of mode `auto`."""
