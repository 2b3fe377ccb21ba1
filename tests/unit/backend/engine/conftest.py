"""The control of a target's weights over an engine core that only notes what is asked of it."""

from pathlib import Path

import pytest

from backend.engine.weights import WeightControl
from tests.unit.backend.engine.noted_core import Core, checkpoint


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def control(core: Core, tmp_path: Path) -> WeightControl:
    control = WeightControl(core, checkpoint(tmp_path / "old", a=(2, 3), b=(4,)), can_sleep=False)
    control.on_changed = lambda: core.log.append("begin" if control.is_paused else "on")
    control.on_renewed = lambda: core.log.append("renewed")
    return control
