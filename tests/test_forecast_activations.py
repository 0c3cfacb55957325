"""The forecast's bytes per token against what autograd saves in transformers' own layers on a CPU."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from memo_hf.errors import ConfigError
from memo_hf.forecasting.activations import Training, token_bytes
from memo_hf.forecasting.shapes import ModelShape

TOKENS = 48
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2 = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "vocab_size": 128,
    "n_positions": 128,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def saved_bytes(model, layer, input_ids) -> int:
    """Bytes of the distinct storages that one layer saves, parameters, buffers, cos and sin apart."""
    stay = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    found, inside = {}, []

    def pack(tensor):
        key = tensor.untyped_storage()._cdata
        if inside and key not in stay:
            found[key] = tensor
        return tensor

    def enter(module, args, kwargs):
        inside.append(True)
        stay.update(t.untyped_storage()._cdata for t in kwargs.get("position_embeddings", ()))
        hidden = args[0] if args else kwargs["hidden_states"]
        found[hidden.untyped_storage()._cdata] = hidden  # h is swapped whether autograd saves it or not

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: inside.clear())
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=input_ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # raised inside peft
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("model_type", "config", "targets"),
    [
        ("llama", LLAMA, ()),
        ("llama", LLAMA, ("q_proj", "v_proj")),
        ("llama", LLAMA, ALL),
        ("mistral", LLAMA, ()),
        ("qwen3", LLAMA, ()),
        ("qwen2", LLAMA, ("o_proj", "down_proj")),
        ("gpt2", {**GPT2, "activation_function": "gelu"}, ()),
        ("gpt2", {**GPT2, "activation_function": "gelu_new"}, ()),
        ("qwen3_moe", MOE, ()),
    ],
)
def test_bytes_per_token_are_what_autograd_saves(model_type, config, targets, dtype):
    loaded = AutoConfig.for_model(model_type, **config)
    loaded._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(loaded).to(dtype).train()
    stack = model.transformer.h if model_type == "gpt2" else model.model.layers
    if targets:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=3, target_modules=list(targets), lora_dropout=0.0))
    counted = saved_bytes(model, stack[1], torch.randint(0, 128, (1, TOKENS)))

    shape = ModelShape.from_config("tiny", loaded.to_dict())
    kind = shape.kinds(0)[-1]
    element = dtype.itemsize
    training = Training(
        element_bytes=element,
        lora_rank=3 if targets else 0,
        lora_targets=frozenset(targets),
        norm_statistic_bytes=element,
    )
    per_token = token_bytes(shape, kind, training)
    total = per_token.input + per_token.output + per_token.logsumexp + per_token.qkv + per_token.others
    constant = 4 * shape.num_experts if kind.is_moe else 0  # where each expert's tokens end
    masks = config.get("num_experts_per_tok", 0) * TOKENS  # a byte each, in transformers 5.17
    assert counted - total * TOKENS - constant in (0, masks)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("llama", LLAMA), ("qwen3", LLAMA), ("qwen2", LLAMA), ("gpt2", GPT2), ("qwen3_moe", MOE)],
)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted(model_type, config, tied):
    loaded = AutoConfig.for_model(model_type, **{**config, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    assert ModelShape.from_config("tiny", loaded.to_dict()).num_parameters == model.num_parameters()


def test_training_is_checked():
    with pytest.raises(ConfigError, match=r"lora_targets \['dense'\] are unknown"):
        Training(lora_rank=4, lora_targets=frozenset({"dense"}))
    with pytest.raises(ConfigError, match="set both or neither"):
        Training(lora_rank=4)
