"""`python -m loadtest [OPTIONS] [-- SETTINGS]`: `locust -f loadtest/locustfile.py` without its web page.

Settings behind `--` go to the `outrider serve` that is started.  Exit status: 0 all objectives met, 1 some missed or the run
failed, 2 wrong arguments, 130 Ctrl-C before the load began.
"""

import shlex
import sys
from pathlib import Path

from locust import events
from locust.main import main as run_locust

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
DEFAULTS = {"headless": True, "only_summary": True, "loglevel": "WARNING", "stop_timeout": "30"}
"""Of Locust's own options; arguments, `LOCUST_*` variables and a --config file override them."""


def main(arguments: list[str]) -> None:
    """Runs Locust, which ends the process."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    settings = shlex.join(arguments[at + 1 :])
    sys.argv = ["locust", "-f", str(LOCUSTFILE), *arguments[:at], *([f"--serve={settings}"] if settings else [])]
    events.init_command_line_parser.add_listener(lambda parser: parser.set_defaults(**DEFAULTS))
    try:
        run_locust()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
