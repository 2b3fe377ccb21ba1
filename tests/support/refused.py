"""What a request is refused with.  Tests only."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.http.errors import BadRequest


def refused(call: Callable[..., Any], *given: Any, **named: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call(*given, **named)
    return caught.value
