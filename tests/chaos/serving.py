"""`outrider serve` whose gateway takes no request for poison: the campaign kills verifiers under innocent requests."""

from __future__ import annotations

import sys
import threading
from typing import Any
from unittest import mock

from gateway.cli import main as cli
from gateway.cli.processes import run_gateway
from outrider.child import end_with_parent

LOSSES = 50


def patient_gateway(*given: Any) -> None:
    with mock.patch("gateway.fleet.core.POISON_AFTER", LOSSES):
        run_gateway(*given)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=(int(sys.argv.pop(1)),), daemon=True).start()
    with mock.patch("gateway.cli.main.run_gateway", patient_gateway):
        sys.exit(cli.main())
