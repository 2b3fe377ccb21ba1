"""Muon and AdamW side by side, with one schedule."""

from collections.abc import Iterable

import torch
from torch import nn


class Optimizers:
    """Muon for the weight matrices, AdamW for embeddings, output heads and norms; one schedule scales both."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], matrix_rate: float, embedding_rate: float, decay: float
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters:
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(parameter)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=embedding_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` of the full rates, and clear them."""
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
