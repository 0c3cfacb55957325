"""The chunked loss where parameters come and go, and where gradients are reduced: ZeRO-3's hooks, DDP, FSDP2."""

import warnings

import pytest
import torch
from loss_models import CHUNK, assert_same, gradients, make_batch, make_model, own_loss, step
from torch import nn

from memo_hf.layers.loss import install_chunked_loss


@pytest.mark.parametrize("loss_of", ["loss", "rows", "whole"])
def test_parameters_gathered_by_the_heads_hooks(loss_of):
    # ZeRO-3 has the weight only between the head's forward hooks, and in backward after a hook on its output.
    model, inputs = make_model(), make_batch()
    labels = inputs.pop("labels")
    losses = {
        "loss": lambda output: own_loss(output, labels),
        "rows": lambda output: output.logits.logsumexp(-1).sum(),
        "whole": lambda output: output.logits.var(),
    }
    loss_of = losses[loss_of]
    stock = step(model, inputs, loss_of)
    head, gathers = model.lm_head, []
    full, head.weight.ds_id = head.weight.data, 0

    def gather(*_):
        gathers.append(1)
        head.weight.data = full

    def release(*_):
        head.weight.data = torch.empty(0)

    class BeforeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            return output.detach()

        @staticmethod
        def backward(ctx, grad):
            gather()
            return grad

    def after(module, args, output):
        release()
        return BeforeBackward.apply(output) if isinstance(output, torch.Tensor) else output

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(after)
    install_chunked_loss(model, CHUNK)
    release()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "var needs the whole logits")
        assert_same(stock, step(model, inputs, loss_of))
    assert len(gathers) == 2  # the call that was put off, whose weight serves all chunks, and backward


@pytest.fixture
def one_rank(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_data_parallel_with_a_loss_outside_the_model(one_rank, options):
    # DDP looks for used parameters from the model's outputs, and passes these through a node of its own.
    model, inputs = make_model(), make_batch()
    labels = inputs.pop("labels")
    stock = step(model, inputs, lambda output: own_loss(output, labels))
    install_chunked_loss(model, CHUNK)
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    for _ in range(2):
        loss, _ = step(wrapped, inputs, lambda output: own_loss(output, labels))
        assert_same(stock, (loss, gradients(model)))


@pytest.mark.parametrize("where", ["inside", "outside", "rows outside"])
def test_fully_sharded_with_resharding(one_rank, where):
    # With the loss outside the model, FSDP2 has sharded the head's weight again by the time it is needed.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, inputs = make_model(), make_batch()
    labels = inputs["labels"] if where == "inside" else inputs.pop("labels")
    loss_of = {
        "inside": lambda output: output.loss,
        "outside": lambda output: own_loss(output, labels),
        "rows outside": lambda output: output.logits.logsumexp(-1).sum(),
    }[where]
    stock = step(model, inputs, loss_of)
    install_chunked_loss(model, CHUNK)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    for _ in range(2):
        loss, grads = step(model, inputs, loss_of)
        assert_same(stock, (loss, {name: grad.full_tensor() for name, grad in grads.items()}))
