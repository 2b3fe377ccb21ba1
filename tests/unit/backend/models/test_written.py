"""A directory that was written anew is told from what it was."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch


def test_a_head_written_anew_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backend.engine.worker import gpu_worker as worker

    load_fc = Mock(return_value=torch.nn.Identity())
    runner = SimpleNamespace(device="cpu", dtype=torch.float32)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("backend.models.checkpoint.load_fc", load_fc)
    options = {"raw_features": False, "head_dir": "own", "aux_layers": (1,), "ring_bytes": 0}
    mixed: Any = SimpleNamespace(model_runner=runner)
    shipper: Any = worker.Mixed._make_shipper(mixed, options)
    other = str(tmp_path)
    for at, text in enumerate(("one", "two")):
        (tmp_path / "model.safetensors").write_text(text)
        os.utime(tmp_path / "model.safetensors", ns=(at, at))
        for head in ("", other, other):
            shipper._projection(head)
    assert load_fc.call_args_list == [call("own"), call(other), call(other)]
