"""The language-model head, run over chunks of rows, with gradients that leave through one autograd node.

`logits_ops.py` calls it; it knows nothing of tensors that pretend to be logits, nor of models. One `HeadCall` is
one call of the head that was put off. What is asked of its logits later is a *job*:

- `LossJob`: a cross entropy summed over rows. Gradients are made in the forward pass, chunk by chunk, so that the
  head's matrix product runs three times in all, as without chunks;
- `RowJob`: one result per row. Nothing is kept; backward runs each chunk's forward again;
- `WholeJob`: the full logits, with the graph and the memory of the stock model.

The autograd graph is: hidden and parameters -> `_Defer` -> put-off logits -> job -> result. A job's backward writes
what it has to give into the call's ledger and passes no gradient on; `_Defer` runs after the last job and returns one
gradient per input. So every parameter is ready once, whatever the number of jobs, and the hooks that DDP, FSDP2 and
ZeRO put on a model's outputs fire between the two, as they would on real logits.
"""

from __future__ import annotations

import contextlib

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from memo_hf.layers.zero import is_partitioned


def autocast_now(device: torch.device) -> contextlib.AbstractContextManager:
    """A context that brings back today's autocast state for `device`, to be entered later, perhaps more than once."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


class InsideHead:
    """Argument that asks the patched head to run `function` between its own hooks (see `HeadCall.run`)."""

    def __init__(self, function):
        self.function = function


class Gradients:
    """Gradients of one call: `hidden` (rows, width) in its dtype; `parameters`, summed in fp32 or wider."""

    def __init__(self, call: HeadCall):
        self.hidden = torch.zeros_like(call.hidden) if call.needs_hidden else None
        self.parameters: list[torch.Tensor | None] = [None] * len(call.trainable)  # None: not used by the head

    def add(self, index: torch.Tensor, leaves: list[torch.Tensor], grads: tuple[torch.Tensor | None, ...]) -> None:
        """Add what `autograd.grad` gave for hidden rows `index`, where they need it, and for the parameters."""
        grads = list(grads)
        if self.hidden is not None:
            self.hidden.index_add_(0, index, grads.pop(0).reshape(-1, self.hidden.shape[-1]))
        self._add_parameters(grads)

    def _add_parameters(self, grads: list[torch.Tensor | None]) -> None:
        for slot in range(len(grads)):
            grad, total = grads[slot], self.parameters[slot]
            grads[slot] = None
            if grad is None:
                continue
            if total is None:
                self.parameters[slot] = grad
            else:
                wide = torch.promote_types(total.dtype, torch.float32)
                self.parameters[slot] = total.to(wide).add_(grad)

    def merge(self, other: Gradients) -> Gradients:
        """Add the gradients of another job of the same call, which are used up."""
        if self.hidden is not None:
            self.hidden += other.hidden
        self._add_parameters(other.parameters)
        return self

    def scale_(self, factor: torch.Tensor) -> Gradients:
        for tensor in (self.hidden, *self.parameters):
            if tensor is not None:
                tensor.mul_(factor)
        return self


class HeadCall:
    """One call of a head that was put off: what is needed to run it, or any rows of it, later.

    Args:
        head: the module, whose `forward` is patched and hands `InsideHead` arguments to their function.
        forward: the head's own forward, called with (..., width).
        hidden: (..., width), floating point.
        chunk_rows: rows that go through the head at once.
        on_whole: called with the name of an operation that needs the full logits.
    """

    def __init__(self, head, forward, hidden: torch.Tensor, chunk_rows: int, on_whole):
        self.head, self.forward, self.on_whole = head, forward, on_whole
        self.lead, self.chunk_rows = hidden.shape[:-1], chunk_rows
        self.hidden = hidden.detach().reshape(-1, hidden.shape[-1])
        self.needs_hidden = hidden.requires_grad
        self.autocast = autocast_now(hidden.device)
        self.slots = [(m, key, p) for m in head.modules() for key, p in m._parameters.items() if p is not None]
        self.trainable = list({id(p): p for _, _, p in self.slots if p.requires_grad}.values())
        # ZeRO-3 has gathered them for this call; they are kept for the first job, so that it gathers nothing.
        self.whole = {id(p): p.detach() for _, _, p in self.slots if is_partitioned(p)}
        self.ledger: list = []

    def run(self, function):
        """`function()` in a forward pass, with the head's parameters at hand.

        Where hooks of the head gather them (ZeRO-3), the first job has them from the call that was put off. Another one
        runs inside the head's own call, so that they are gathered once for all chunks. In backward a hook on the head's
        output has gathered them.
        """
        gathered_by_hooks = any(is_partitioned(p) for _, _, p in self.slots)
        with self.autocast:  # the outermost context keeps autocast's copy of the weight for all chunks
            if gathered_by_hooks and not self.whole:
                return self.head(InsideHead(function))
            try:
                return function()
            finally:
                self.whole = {}

    @contextlib.contextmanager
    def leaves(self, trainable: bool = True):
        """Aliases in place of the parameters, so that neither their hooks nor DDP see the inner gradients.

        Yields those of `self.trainable`, which require gradients if `trainable`.
        """
        aliases, before = {}, []
        for module, key, parameter in self.slots:
            # Not asked for under ZeRO-3, which would gather it then.
            now = parameter if is_partitioned(parameter) else module._parameters[key]
            before.append((module, key, now))
            now = self.whole.get(id(parameter), now)
            if now is not parameter:  # FSDP2 has sharded it again: the loss is computed outside the model
                now = (now.full_tensor() if isinstance(now, DTensor) else now).to(parameter.dtype)
            if parameter.requires_grad:
                now = now.detach().requires_grad_(trainable)
            aliases.setdefault(id(parameter), now)
        try:
            for module, key, parameter in self.slots:
                module._parameters[key] = aliases[id(parameter)]
            yield [aliases[id(parameter)] for parameter in self.trainable]
        finally:
            for module, key, parameter in before:
                module._parameters[key] = parameter

    def probe(self) -> torch.Tensor | None:
        """No rows of output, (0, V) with the dtype of the whole; None for a head that cannot run on chunks: it trains
        tensors that are not its parameters (FSDP1's views), or its output is not one row for each row."""
        with self.autocast, self.leaves(trainable=False), torch.enable_grad():
            row = self.forward(self.hidden[:1])
        usable = isinstance(row, torch.Tensor) and not row.requires_grad and row.dim() == 2 and len(row) == 1
        return row[:0] if usable else None

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows (index,) of the hidden states as a leaf of the inner graph."""
        return self.hidden.index_select(0, index).requires_grad_(self.needs_hidden)

    def defer(self, hidden: torch.Tensor, make) -> torch.Tensor:
        """`make()`, which stands for the logits, as the output of an autograd node over hidden and parameters."""
        return _Defer.apply(self, make, hidden, *self.trainable)


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, make, hidden, *parameters):
        ctx.ledger, ctx.shape = call.ledger, hidden.shape
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        total = None
        while ctx.ledger:
            gradients = ctx.ledger.pop()()
            total = gradients if total is None else total.merge(gradients)
        if total is None:
            return (None, None, None) + (None,) * len(ctx.dtypes)
        hidden = None if total.hidden is None else total.hidden.view(ctx.shape)
        parameters = (
            None if grad is None else grad.to(dtype) for grad, dtype in zip(total.parameters, ctx.dtypes, strict=True)
        )
        return (None, None, hidden, *parameters)


class Consume(torch.autograd.Function):
    """`apply(job, logits)`: the job's result, in the graph after the put-off `logits` or what was made of them."""

    @staticmethod
    def forward(ctx, job, logits):
        ctx.job = job
        ctx.set_materialize_grads(False)
        result = job.forward()
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if grad is not None:
            ctx.job.backward(grad)
        return None, None


class LossJob:
    """The sum of `loss(rows of logits, targets)` over chunks of rows, in fp32 or wider.

    One chunk is ordinary autograd code, for any head. Measured with 4,096 tokens, width 512, vocabulary 32,000, fp32,
    one busy core, value and gradients, best of four interleaved runs: 5.2 s and 165 MiB with chunks of 256; torch's
    chunked `linear_cross_entropy` (2.13) 7.1 s and 141 MiB; stock 8.1 s and 1,500 MiB. A hand-written softmax gradient
    instead of autograd's gained nothing (4.95 s against 5.0). torch's takes a plain weight only, no softcap, no label
    smoothing, and sums bf16 losses in bf16, so it would be a second path and not a better one.

    Args:
        call: the head's call.
        evaluate: (rows, V) head output -> (rows, V) logits, what the model does to them after the head.
        loss: (rows, V), (rows,) -> scalar sum over the rows.
        index, targets: (rows,) int64, the rows that count and their labels.
        with_grad: whether a backward pass may follow.
    """

    def __init__(self, call, evaluate, loss, index, targets, with_grad):
        self.work = (call, evaluate, loss, index, targets, with_grad)
        self.ledger, self.gradients = call.ledger, None

    def forward(self):
        call, evaluate, loss, index, targets, with_grad = self.work
        self.work = None  # the hidden states need not outlive the forward pass
        if with_grad:
            self.gradients = Gradients(call)
        total = torch.zeros((), dtype=torch.promote_types(call.hidden.dtype, torch.float32), device=index.device)

        def chunks():
            with call.leaves() as parameters, torch.set_grad_enabled(with_grad):
                for rows, labels in zip(index.split(call.chunk_rows), targets.split(call.chunk_rows), strict=True):
                    hidden = call.rows(rows)
                    value = loss(evaluate(call.forward(hidden)), labels)
                    total.add_(value.detach())
                    leaves = [hidden] * call.needs_hidden + parameters
                    if with_grad and leaves:
                        self.gradients.add(rows, leaves, torch.autograd.grad(value, leaves, allow_unused=True))

        call.run(chunks)
        return total

    def backward(self, grad):
        if self.gradients is None:
            raise RuntimeError(
                "Trying to backward through the chunked loss a second time: the first backward used up its gradients. "
                "Call backward once for each loss, or set chunked_loss=False."
            )
        gradients, self.gradients = self.gradients, None
        self.ledger.append(lambda: gradients.scale_(grad))


class RowJob:
    """`function(rows of logits, *row_args)` for every row, nothing kept for backward.

    Args:
        call, evaluate: as in `LossJob`.
        function: (rows, V), *row_args -> (rows, ...).
        index: (rows,) int64, the rows wanted, in order.
        row_args: tensors (rows, ...) that are cut along with the rows.
    """

    def __init__(self, call, evaluate, function, index, row_args):
        self.call, self.evaluate, self.function, self.index, self.row_args = call, evaluate, function, index, row_args

    def _chunks(self):
        size = self.call.chunk_rows
        return zip(self.index.split(size), *(arg.split(size) for arg in self.row_args), strict=True)

    def forward(self):
        def chunks():
            with self.call.leaves(trainable=False):
                return torch.cat(
                    [
                        self.function(self.evaluate(self.call.forward(self.call.rows(rows))), *args)
                        for rows, *args in self._chunks()
                    ]
                )

        with torch.no_grad():
            return self.call.run(chunks)

    def backward(self, grad):
        self.call.ledger.append(lambda: self._gradients(grad))

    def _gradients(self, grad):
        gradients = Gradients(self.call)
        with self.call.autocast, self.call.leaves() as parameters, torch.enable_grad():
            for (rows, *args), rows_grad in zip(self._chunks(), grad.split(self.call.chunk_rows), strict=True):
                hidden = self.call.rows(rows)
                leaves = [hidden] * self.call.needs_hidden + parameters
                if not leaves:
                    break
                result = self.function(self.evaluate(self.call.forward(hidden)), *args)
                gradients.add(rows, leaves, torch.autograd.grad(result, leaves, rows_grad, allow_unused=True))
        return gradients


class WholeJob:
    """The head's full output, as the stock model has it: same values, same saved tensors."""

    def __init__(self, call, with_grad):
        self.call, self.with_grad = call, with_grad

    def forward(self):
        call = self.call

        def whole():
            with call.leaves() as parameters, torch.set_grad_enabled(self.with_grad):
                hidden = call.hidden.view(*call.lead, -1).detach().requires_grad_(call.needs_hidden)
                self.leaves = [hidden] * call.needs_hidden + parameters
                result = call.forward(hidden)
            self.edge = torch.autograd.graph.get_gradient_edge(result) if result.requires_grad else None
            return result.detach()

        return call.run(whole)

    def backward(self, grad):
        def gradients():
            result = Gradients(self.call)
            if self.edge is not None:
                every = torch.arange(len(self.call.hidden), device=grad.device)
                result.add(every, self.leaves, torch.autograd.grad(self.edge, self.leaves, grad, allow_unused=True))
            return result

        self.call.ledger.append(gradients)
