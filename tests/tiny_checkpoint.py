"""A checkpoint folder as users have it, made from nothing: a Llama of three layers with a vocabulary of bytes."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Marks the assistant's words, as templates made for training do.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }};{% endgeneration %}{% else %}{{ message.content }};{% endif %}{% endfor %}"
)


def write_checkpoint(folder, chat_template=CHAT_TEMPLATE):
    """Writes weights, configuration and tokenizer to `folder` and returns it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    raw = Tokenizer(models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=vocabulary["<end>"],
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
