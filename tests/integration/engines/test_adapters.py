"""A verifier that reads an adapter hears nothing meanwhile: real vLLM."""

from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from backend.engine.arguments import adapter_number
from backend.engine.client import EngineCodec
from backend.fleet import VerifierStats
from tests.support.lora import write_adapter
from tests.support.processes import Verifier

pytestmark = pytest.mark.engine


def test_a_verifier_says_before_it_reads_one_and_after_it(
    plain: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways give up verifiers that are silent for long, but for those that are paused."""
    reports: list[bool] = []
    codec, path = EngineCodec(), str(write_adapter(tmp_path / "b"))

    def take(frames: list[bytes]) -> None:
        if isinstance(heard := codec.hear(frames), VerifierStats):
            reports.append(heard.paused)

    monkeypatch.setattr(plain.client, "_take", take)
    plain.client.dealer.send(*codec.call(1, "add_lora", [LoRARequest("b", adapter_number("b", path), path)]))
    plain.client.run_until(lambda: reports[-2:] == [True, False])
