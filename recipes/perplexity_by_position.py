"""Fine-tune past the length a model was trained at, and print the held-out perplexity by position before and after.

    python recipes/get_checkpoint.py
    python recipes/perplexity_by_position.py                # a slice of two layers: minutes on a CPU
    python recipes/perplexity_by_position.py --layers 30 --fit_steps 0 --device cuda ...    # the whole model

A model cut to its first layers no longer speaks, so the slice is fitted to short sequences of the same text first.
Then its positions are stretched (YaRN), and it is trained on long sequences twice: with memo_hf and without. Held out
are the two longest documents. docs/long_text.md tells more.
"""

import argparse
import math
from pathlib import Path

import torch
from datasets import Dataset
from launching import config_file, without_traceback
from long_text import long_sequences, open_documents, stretch_positions, tokenize
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from memo_hf import MemoConfig, MemoTrainer
from memo_hf.arguments import Parser, tokens


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="outputs/smollm2-135m", help="folder of a Llama-like checkpoint with default positions")
    add("--dataset", default="stdlib", help="text files, as for the other recipes")
    add("--layers", type=int, default=2, help="keep only this many of the decoder layers")
    add("--fit_len", type=tokens, default=512, help="tokens of a sequence on which the slice is fitted")
    add("--fit_steps", type=int, default=40, help="0: the model is taken as it is")
    add("--seq_len", type=tokens, default=9216, help="tokens of a sequence, beyond what the model was trained at")
    add("--steps", type=int, default=3, help="training steps at that length")
    add("--learning_rate", type=float, default=1e-4, help="at that length; the slice is fitted at five times as much")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--output_dir", default="outputs/perplexity_by_position")
    return parser.parse_args(argv)


def split_documents(source: str) -> tuple[Dataset, list[dict]]:
    """The documents to train on, and the two longest, which are held out."""
    rows = sorted(open_documents(source), key=lambda row: len(row["text"]))
    return Dataset.from_list(rows[:-2]), rows[-2:]


def train(model, tokenizer, documents: Dataset, seq_len: int, steps: int, learning_rate: float, options, *, memo: bool):
    """Trains all weights, a sequence in each of `steps`; the loss of each, a list."""
    training = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=1,
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=options.device == "cpu",
    )
    stream = documents.shuffle(seed=training.seed).to_iterable_dataset()
    data = long_sequences(stream, tokenizer, seq_len)
    config = MemoConfig(unswapped_layers=min(2, options.layers // 2))  # a slice of two layers would keep both
    trainer = MemoTrainer(model=model, args=training, train_dataset=data, memo=config if memo else None)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def losses_by_position(model, tokenizer, held_out: list[dict], seq_len: int) -> torch.Tensor:
    """Mean loss of the token at each position but the first, (seq_len - 1,): the logits never exist in full."""
    model.eval()
    total = torch.zeros(seq_len - 1)
    for row in held_out:
        ids = torch.from_numpy(tokenize(row, tokenizer)[0][:seq_len]).to(model.device)
        if len(ids) < seq_len:
            raise SystemExit(f"a held-out document has {len(ids):,} tokens, and one sequence takes {seq_len:,}")
        hidden = model.model(ids[None], use_cache=False).last_hidden_state[0, :-1]
        pieces = zip(hidden.split(1024), ids[1:].split(1024), strict=True)
        total += torch.cat([cross_entropy(model.lm_head(h), t, reduction="none").float().cpu() for h, t in pieces])
    return total / len(held_out)


def table(columns: dict[str, torch.Tensor], trained: int) -> str:
    """Perplexity over ranges of positions that double, with an edge at the trained length."""
    length = len(next(iter(columns.values()))) + 1
    edges = sorted({min(n, length) for n in (0, 512, 1024, 2048, 4096, 8192, 16384, trained, length)})
    lines = [f"{'positions':<16}" + "".join(f"{name:>20}" for name in columns)]
    for start, stop in zip(edges, edges[1:], strict=False):
        values = [math.exp(losses[max(start, 1) - 1 : stop - 1].mean()) for losses in columns.values()]
        lines.append(f"{f'{start}-{stop - 1}':<16}" + "".join(f"{value:>20.1f}" for value in values))
    return "\n".join(lines)


@without_traceback()
def main(argv=None) -> None:
    options = parse_arguments(argv)
    config_file(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    documents, held_out = split_documents(options.dataset)
    config = AutoConfig.from_pretrained(options.model)
    config.num_hidden_layers, trained = options.layers, config.max_position_embeddings
    rate = options.learning_rate
    fitted = Path(options.output_dir) / "fitted"
    model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=torch.float32)
    if options.fit_steps:
        losses = train(model, tokenizer, documents, options.fit_len, options.fit_steps, 5 * rate, options, memo=False)
        print(f"Fitted {options.layers} layers at {options.fit_len} tokens: loss {losses[0]:.2f} to {losses[-1]:.2f}.")
    model.save_pretrained(fitted)
    columns = {"before": losses_by_position(model, tokenizer, held_out, options.seq_len)}

    stretch_positions(config, options.seq_len, "yarn")
    curves = {}
    for name, memo in (("with memo_hf", True), ("without", False)):
        model = AutoModelForCausalLM.from_pretrained(fitted, config=config, dtype=torch.float32)
        curves[name] = train(model, tokenizer, documents, options.seq_len, options.steps, rate, options, memo=memo)
        columns[name] = losses_by_position(model, tokenizer, held_out, options.seq_len)
    print(f"\nHeld-out perplexity by position; the model was trained at {trained:,}, and now at {options.seq_len:,}:")
    print(table(columns, trained))
    for name, curve in curves.items():
        print(f"training loss {name}: {', '.join(f'{loss:.5f}' for loss in curve)}")


if __name__ == "__main__":
    main()
