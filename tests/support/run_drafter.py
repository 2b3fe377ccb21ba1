"""Runs one `DrafterProcess` in a process of its own; end of input stops it.  Tests only.

python -m tests.support.run_drafter '{"paths": {...}, "address": "ipc://...", "settings": {...}}'
"""

from __future__ import annotations

import json
import sys

import msgspec

from backend.config import DraftingSettings
from backend.drafter.process import DrafterModel, DrafterProcess, pin_cores
from backend.models.resolve import ResolvedModels


def main() -> None:
    job = json.loads(sys.argv[1])
    paths = msgspec.convert(job["paths"], ResolvedModels)
    pin_cores(job.get("cores", []))
    model = DrafterModel(paths.target_dir, paths.drafter_dir)
    drafter = DrafterProcess(
        job.get("drafter_id", "drafter-0"),
        model,
        DraftingSettings.model_validate(job.get("settings", {})),
        job["address"],
    )
    drafter.start()
    print(json.dumps({"address": drafter.address}), flush=True)
    sys.stdin.read()
    drafter.stop()


if __name__ == "__main__":
    main()
