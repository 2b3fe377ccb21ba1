"""`python -m gateway.cli` is the command `outrider`."""

import sys

from gateway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
