"""`python -m tests.chaos [--quick] [--seed N] [--output DIR] ...`: status 0 when nothing was lost, wrong or left over."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path


def main() -> int:
    """Runs what was asked for and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few faults, in a minute or two")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and the order of requests")
    parser.add_argument("--mode", default="auto", help="draft mode (default: auto)")
    parser.add_argument("--output", type=Path, default=Path("chaos-report"), help="directory of chaos.json")
    options = parser.parse_args()
    logging.basicConfig(level="ERROR")

    import vllm  # noqa: F401  (must be the first of vLLM's modules)

    from tests.chaos import campaign

    result = asyncio.run(campaign.disturbed(options))
    options.output.mkdir(parents=True, exist_ok=True)
    text = campaign.report(result, "python -m tests.chaos " + " ".join(sys.argv[1:]))
    (options.output / "chaos.json").write_text(text)
    print(text)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
