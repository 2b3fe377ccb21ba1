"""`outrider.Fleet` joins a real fleet."""

from __future__ import annotations

import pytest

from outrider import Fleet, OutriderError
from tests.support.fleet_process import ServedFleet


def test_samples_of_a_joined_fleet(fleet: ServedFleet) -> None:
    with Fleet.join(fleet.url) as joined:
        fields = {"seed": 1, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        first = {(s.index, s.sample): s for s in joined.generate(["def f(", "import "], fields, n=2)}
        again = {(s.index, s.sample): s for s in joined.generate(["def f(", "import "], fields, n=2)}
        assert sorted(first) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {key: s.token_ids for key, s in first.items()} == {key: s.token_ids for key, s in again.items()}
        assert all(len(s.token_ids) == 8 and s.logprobs is not None and len(s.logprobs) == 8 for s in first.values())
        assert first[0, 0].token_ids != first[0, 1].token_ids
        with pytest.raises(OutriderError) as raised:
            list(joined.generate(["x"], {"temperature": -3}))
        assert raised.value.status == 400
