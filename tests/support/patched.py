"""`outrider` with other constants in the gateway's process: `python -m tests.support.patched PARENT CONSTANTS ...`."""

import contextlib
import json
import sys
import threading
from typing import Any
from unittest import mock

from gateway.cli import main as cli
from gateway.cli.processes import run_gateway
from outrider.child import end_with_parent


def patched_gateway(*given: Any) -> None:
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch(name, value))
        run_gateway(*given)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=(int(sys.argv.pop(1)),), daemon=True).start()
    constants: dict[str, Any] = json.loads(sys.argv.pop(1))
    with mock.patch("gateway.cli.main.run_gateway", patched_gateway):
        sys.exit(cli.main())
