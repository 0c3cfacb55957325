"""A module outside of the layers that works per token, such as the norm after the last layer, run in chunks.

Its input stays on the device, since backward begins with it; what it would save beside is recomputed chunk by chunk.
"""

from __future__ import annotations

from torch import Tensor, nn

from memo_hf.layers.step import Step
from memo_hf.layers.tokenwise import Node, cut_into_chunks


class TokenModule:
    """Runs one module of shape (batch, tokens, ...) -> (batch, tokens, ...) in chunks of tokens.

    Args:
        module: the module.
        forward: its own forward, of one tensor.
    """

    def __init__(self, module: nn.Module, forward):
        self.module, self.forward = module, forward

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """The module's output for all tokens."""
        parameters: dict[bool, list] = {True: [], False: []}
        for owner in self.module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    parameters[parameter.requires_grad].append((owner, name))
        node = Node(
            run=lambda inputs, start, stop: (self.forward(inputs[0]),),
            parameters=parameters[True],
            frozen=parameters[False],
            chunks=cut_into_chunks(hidden.shape[1], step.settings.chunk_tokens, 0.0),
            group=step.engine.open_group(keep=True),
        )
        return node.apply(hidden)[0]
