"""Linear modules whose output nobody reads in a recompute, so that the product is not computed again.

The last projection of an MLP is added to the residual and leaves the layer: its backward needs its input and weight,
not its output. The check finds out which modules these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Unread(torch.autograd.Function):
    """A linear map whose output is left unset; the gradients are those of `torch.nn.functional.linear`, to the bit."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor | None, fill: float | None):
        ctx.save_for_backward(inputs, weight)
        output = inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))
        return output if fill is None else output.fill_(fill)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        inputs, weight = ctx.saved_tensors
        rows, inputs_rows = gradient.reshape(-1, gradient.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
        of_inputs = rows.mm(weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        of_weight = rows.t().mm(inputs_rows) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias, None


def can_be_unread(module: nn.Module) -> bool:
    """Whether `module` is a plain linear map that nothing watches."""
    watched = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is nn.Linear and not watched


@contextmanager
def unread(modules: list[nn.Module], fill: float | None = None) -> Iterator[None]:
    """Leave the outputs of these modules unset, or set to `fill`, for the body.

    Under autocast they run as ever, since what it would cast depends on the operation.
    """
    chosen = [module for module in modules if can_be_unread(module)]

    def make(module):
        def forward(inputs):
            if torch.is_autocast_enabled(inputs.device.type) or inputs.dtype != module.weight.dtype:
                return nn.Linear.forward(module, inputs)
            return _Unread.apply(inputs, module.weight, module.bias, fill)

        return forward

    for module in chosen:
        module.forward = make(module)
    try:
        yield
    finally:
        for module in chosen:
            del module.forward
