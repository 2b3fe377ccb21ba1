"""How the demo pair is trained: `python -m backend.lab.demo`."""
