"""The requests of a training step of a Llama-like model, from a list of operators. For benchmarks of the planner."""

from __future__ import annotations

from memo_hf.planner.trace import Event, Trace


class _Recorder:
    def __init__(self):
        self.events, self.phase, self.size_of, self.num_requests = [], "", {}, 0

    def malloc(self, size):
        self.events.append(Event("malloc", self.num_requests, size, self.phase, 0, 0))
        self.num_requests += 1
        return self.num_requests - 1

    def free(self, *requests):
        for request in requests:
            self.events.append(Event("free", request, 0, self.phase, 0, 0))


def llama_step(
    num_layers: int = 32,
    tokens: int = 16384,
    hidden: int = 4096,
    ffn: int = 11008,
    kv: int = 1024,
    vocab: int = 32000,
    recompute: bool = False,
) -> Trace:
    """One step, bf16, with weight gradients that live until the optimizer, and every layer's input kept.

    Args:
        recompute: Drop what a layer saved at the end of its forward, and make it again in its backward.
    """
    log = _Recorder()
    h, q, k, f, logits = (2 * tokens * width for width in (hidden, hidden, kv, ffn, vocab))
    small = 4 * tokens

    def forward(i, x):
        """The layer's output and what it saved."""
        norm1, rstd1 = log.malloc(h), log.malloc(small)
        q0, k0, v = log.malloc(q), log.malloc(k), log.malloc(k)
        q1, k1 = log.malloc(q), log.malloc(k)
        log.free(q0, k0)
        o, lse = log.malloc(q), log.malloc(32 * small)
        attended = log.malloc(h)
        middle = log.malloc(h)
        log.free(attended)
        norm2, rstd2 = log.malloc(h), log.malloc(small)
        gate, up = log.malloc(f), log.malloc(f)
        act = log.malloc(f)
        product = log.malloc(f)
        down = log.malloc(h)
        out = log.malloc(h)
        log.free(down)
        return out, (norm1, rstd1, q1, k1, v, o, lse, middle, norm2, rstd2, gate, up, act, product)

    def backward(i, saved, d_out):
        """The gradient of the layer's input, and the gradients of its weights."""
        norm1, rstd1, q1, k1, v, o, lse, middle, norm2, rstd2, gate, up, act, product = saved
        d_product = log.malloc(f)
        weights = [log.malloc(2 * hidden * ffn)]
        log.free(product)
        d_up, d_act = log.malloc(f), log.malloc(f)
        log.free(d_product, up, act)
        d_gate = log.malloc(f)
        log.free(d_act, gate)
        d_norm2 = log.malloc(h)
        weights += [log.malloc(2 * hidden * ffn)]
        part = log.malloc(h)
        weights += [log.malloc(2 * hidden * ffn)]
        log.free(d_up, d_gate, part, norm2)
        d_middle = log.malloc(h)
        log.free(d_norm2, rstd2, middle)
        d_sum = log.malloc(h)
        log.free(d_middle, d_out)
        d_o = log.malloc(q)
        weights += [log.malloc(2 * hidden * hidden)]
        dq, dk, dv = log.malloc(q), log.malloc(k), log.malloc(k)
        log.free(d_o, o, lse, q1, k1, v)
        dq0, dk0 = log.malloc(q), log.malloc(k)
        log.free(dq, dk)
        d_norm1 = log.malloc(h)
        weights += [log.malloc(2 * hidden * width) for width in (hidden, kv, kv)]
        log.free(dq0, dk0, dv, norm1)
        d_x = log.malloc(h)
        log.free(d_norm1, rstd1)
        total = log.malloc(h)
        log.free(d_x, d_sum)
        return total, weights

    log.phase = "embedding"
    inputs, saved_by_layer = [log.malloc(h)], []
    for i in range(num_layers):
        log.phase = f"forward {i}"
        out, saved = forward(i, inputs[-1])
        inputs.append(out)
        if recompute:
            log.free(*saved)
        saved_by_layer.append(saved)
    log.phase = "loss"
    scores, in_fp32 = log.malloc(logits), log.malloc(2 * logits)
    log.free(scores)
    d_scores = log.malloc(logits)
    log.free(in_fp32)
    gradients = [log.malloc(2 * hidden * vocab)]
    grad = log.malloc(h)
    log.free(d_scores, inputs.pop())
    for i in reversed(range(num_layers)):
        log.phase = f"backward {i}"
        saved = saved_by_layer[i]
        if recompute:
            out, saved = forward(i, inputs[-1])
            log.free(out)
        grad, weights = backward(i, saved, grad)
        gradients += weights
        log.free(inputs.pop())
    log.phase = "embedding"
    gradients.append(log.malloc(2 * hidden * vocab))
    log.free(grad)
    log.phase = "optimizer"
    for gradient in gradients:
        step = log.malloc(log.events[0].size)
        log.free(step, gradient)
    return Trace(tuple(log.events))
