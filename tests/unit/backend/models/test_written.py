"""A directory that was written anew is told from what it was."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from backend.models.tensor_files import written


def test_files_written_anew_are_other_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before = written(str(tmp_path))
    assert written(str(tmp_path)) == before
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert written(str(tmp_path)) != before
    assert not written(str(tmp_path / "none"))


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
    for text in ("one", "two!"):
        (tmp_path / "model.safetensors").write_text(text)
        for head in ("", other, other):
            shipper._projection(head)
    assert load_fc.call_args_list == [call("own"), call(other), call(other)]
