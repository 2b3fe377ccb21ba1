"""Runs one `VerifierProcess` in a process of its own, told what to do over stdin.  Tests only.

    python -m tests.support.run_verifier '{"settings": {...}, "paths": {...}, "address": "ipc://..."}'

Prints one JSON line when ready.  Then each stdin line is a JSON list of `DrafterRef`s to assign; end of input stops it.
"""

from __future__ import annotations

import json
import logging
import sys

import msgspec


def main() -> None:
    import vllm  # noqa: F401  (must be the first of vLLM's modules)

    from backend.config import Settings
    from backend.fleet import DrafterRef
    from backend.models.resolve import ResolvedModels
    from backend.verifier.process import VerifierProcess

    logging.basicConfig(level="INFO")
    job = json.loads(sys.argv[1])
    process = VerifierProcess(
        job.get("verifier_id", "verifier-0"),
        "incarnation",
        Settings.model_validate(job["settings"]),
        msgspec.convert(job["paths"], ResolvedModels),
        job["address"],
    )
    process.start()
    print(json.dumps({"address": process.address}), flush=True)
    for line in sys.stdin:
        process.set_drafters(msgspec.convert(json.loads(line), list[DrafterRef]))
    process.stop()


if __name__ == "__main__":
    main()
