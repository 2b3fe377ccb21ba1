"""Fails where a GPU would be waited for.  On a CPU nothing waits, so what would is forbidden by name.  Tests only."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = "tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"
"""Methods of a tensor that wait for its values."""
COPIES = "tensor", "as_tensor", "from_numpy"
"""Functions whose result an ordinary copy takes to the GPU, which ends only when all that was launched before has run."""
OPERATORS = "nonzero", "masked_select", "unique", "_unique", "_local_scalar_dense", "equal", "is_nonzero"
"""Beginnings of names of operators whose result, or its size, comes from values."""
INDEXED = "index", "index_put", "index_put_"
ON_A_CPU = {
    "attend": "a GPU has Triton kernels",
    "_int64": "of noise, for which a GPU has Triton kernels",
    "_float32": "of noise, too",
    "gumbel": "of noise, too",
    "rank": "of noise, too",
    "Head._rms": "a GPU has torch's own",
    "_likeliest": "a GPU has torch's own",
}
"""Functions that may read, each with its reason: what they do on a GPU is something else."""


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        assert not name.startswith(OPERATORS), name
        masks = args[1] if name in INDEXED else ()
        assert not any(each is not None and each.dtype == torch.bool for each in masks), "where a mask is true"
        return operator(*args, **(kwargs or {}))


@contextmanager
def nothing_read(allowed: Mapping[str, str] = ON_A_CPU) -> Iterator[Counter[str]]:
    """Within the block, only functions `allowed` (a reason each) read tensors, or copy to them; yields how often each did."""
    seen = Counter[str]()

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_qualname.partition(".<locals>")[0]
            assert caller in allowed, f"{caller} calls {name}"
            seen[caller] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for place, names in ((torch.Tensor, METHODS), (torch, COPIES)):
            for name in names:
                stack.enter_context(mock.patch.object(place, name, guarded(name, getattr(place, name))))
        stack.enter_context(_Operators())
        yield seen
