"""What `outrider --help` prints.  The command line's process."""

from __future__ import annotations

from gateway import administer

ADMINISTRATION = "\n".join(f"  {name:<13} {summary}" for name, summary in administer.SUMMARIES.items())
USAGE = f"""usage: outrider COMMAND [--name value ...]

commands:
  serve         start a fleet and its gateway, until Ctrl-C
  gateway       start a further gateway for a running fleet
  status        show a running fleet
  check-config  show the settings in force and where each came from
  make-key      make an API key and its entry for the keys file
  reload        have a running gateway read its keys, limits and routing again
  records       sum up, join or export what verifiers wrote down
  report        draw a recorded period, or a rollout, as one HTML page
  bench         measure every mode on this machine (it has options of its own)
  simulate      simulate a large fleet under the coordinator's policy (it has options of its own)
  run-batch     carry out a file of OpenAI batch requests at a gateway (it has options of its own)
  rollout       run a trace's prompts over a fleet of its own, with a row of every step (it has options of its own)
  trace         make traces (it has options of its own)
  train-drafter train a head for a model from prompts (it has options of its own)
  train-demo    train the built-in demo models again

changing a running fleet:
{ADMINISTRATION}

`outrider COMMAND --help` lists the settings; each is also a variable (OUTRIDER_GATEWAY__PORT) and a key
of the YAML file given with --config.  `outrider --version` prints the version.
"""
