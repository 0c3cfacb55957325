"""The model of the GPU checks: a Llama of random weights of 8B width, or a toy on a CPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(device: torch.device, *, small: bool, num_layers: int, num_tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = (
        dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
        if small
        else dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128_256,
        )
    )
    config = LlamaConfig(**sizes, num_hidden_layers=num_layers, max_position_embeddings=num_tokens)
    with torch.device(device):
        torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
        try:
            return LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(torch.float32)
