"""Linear layers of a model on CPUs, through oneDNN.

torch's float32 products call MKL, which runs its AVX2 kernels on CPUs of other makers than Intel;
oneDNN, which torch brings along as well, uses AVX-512 on all of them. On an AMD EPYC (Zen 5) that
is 250 against 100 GFLOP/s per core at the sizes of a small model, to the same precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.sharded_tensors import is_sharded


def use_onednn(module: nn.Module) -> None:
    """Let every ``nn.Linear`` of a module compute through oneDNN where it runs on a CPU in float32.

    Parameters, their names and all else stay as they are. Does nothing where torch has no oneDNN.
    """
    if not has_onednn():
        return
    for part in module.modules():
        # Subclasses (quantised, adapted) have a forward pass of their own.
        if type(part) is nn.Linear:
            part.__class__ = OneDNNLinear


def has_onednn() -> bool:
    """Whether this build of torch can."""
    present: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return present and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class OneDNNLinear(nn.Linear):
    """An ``nn.Linear`` in every respect but the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``; ``[..., in]`` to ``[..., out]``."""
        weight = self.weight
        suits = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32
        suits = suits and not is_sharded(weight)  # as in tensor parallelism
        if not suits or not input.numel():
            return F.linear(input, weight, self.bias)
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            # The shape is given back out here: networks may write into the output, and torch
            # forbids that for a view that was made inside a function of one's own.
            rows: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                input.reshape(-1, input.shape[-1]), weight, self.bias
            )
            return rows.view(*input.shape[:-1], len(weight))
        return onednn_linear(input, weight, self.bias)


class _Product(torch.autograd.Function):
    """Forward and both products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.biased = bias is not None
        return onednn_linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        wanted = ctx.needs_input_grad
        of_input = of_weight = of_bias = None
        if wanted[0]:
            of_input = onednn_linear(gradient, weight.t(), None).view(input.shape)
        if wanted[1]:
            of_weight = onednn_linear(gradient.t(), input.reshape(-1, weight.shape[1]).t(), None)
        if ctx.biased and wanted[2]:
            of_bias = gradient.sum(0)
        return of_input, of_weight, of_bias


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input @ weight.T + bias`` on a CPU, without a gradient, by the quickest kernel."""
    if not has_onednn() or input.dtype != torch.float32:
        return F.linear(input, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return output
