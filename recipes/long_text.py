"""Long text for a model: documents as a stream of sequences, and positions beyond those that it was trained at.

Used by the recipes; copy it into your own project. Nothing is tokenized before it is needed and a process holds one
sequence at a time, so a sequence may have 1M tokens and the data may be larger than memory.
"""

import copy
import functools
import itertools
import json
import os
import re
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from datasets import Dataset, IterableDataset, load_dataset
from torch import nn

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
IGNORED = -100  # a label that the loss leaves out


def open_documents(source: str, shuffle_seed: int | None = None) -> IterableDataset:
    """The documents of `source`, one a row, read as they are needed.

    Args:
        source: a .txt, .md, .jsonl or .parquet file, a folder of them (a text file is one document), the name of a data
            set on the hub, or what comes with Python: "manual" (some 110,000 tokens) or "stdlib" (several million).
        shuffle_seed: draws files, and rows from a buffer of 100, in an order that this number decides. None: as given.

    Raises:
        SystemExit: a folder without such files, nothing but empty ones, or nothing of that name. While reading: a file
            that cannot be read.
    """
    if source == "manual":
        from pydoc_data.topics import topics

        documents = Dataset.from_dict({"text": list(topics.values())}).to_iterable_dataset()
    elif (files := _local_files(source)) is not None:
        documents = IterableDataset.from_generator(_read, gen_kwargs={"files": files})
    else:
        documents = _from_hub(source)
    return documents if shuffle_seed is None else documents.shuffle(seed=shuffle_seed, buffer_size=100)


def about_num_tokens(source: str) -> int | None:
    """Tokens of `source`, as for `open_documents`, at four bytes each; None where its size is not at hand."""
    if source == "manual":
        return sum(len(row["text"]) for row in open_documents(source)) // 4
    files = _local_files(source)
    if files is None or any(file.lower().endswith(".parquet") for file in files):  # compressed
        return None
    return sum(Path(file).stat().st_size for file in files) // 4


def num_documents(source: str) -> int | None:
    """Documents of `source`, as for `open_documents`; None where it takes reading them to know."""
    if source == "manual":
        return sum(1 for _ in open_documents(source))
    files = _local_files(source)
    one_each = files is not None and all(file.lower().endswith((".txt", ".md", ".py")) for file in files)
    return len(files) if one_each else None


def _local_files(source: str) -> list[str] | None:
    if source == "stdlib":
        return _stdlib_files()
    return _files(source) if Path(source).exists() else None


def _stdlib_files() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    patterns = ("*.py", "asyncio/*.py", "email/*.py", "json/*.py")
    return sorted(str(file) for pattern in patterns for file in folder.glob(pattern))


def _files(source: str) -> list[str]:
    files = sorted(Path(source).rglob("*")) if Path(source).is_dir() else [Path(source)]
    found = [str(file) for file in files if file.suffix.lower() in SUFFIXES]
    if not found:
        raise SystemExit(f"{source}: no file there ends in one of {', '.join(SUFFIXES)}")
    if not any(Path(file).stat().st_size for file in found):
        raise SystemExit(f"{', '.join(found[:3])}: empty, so there is nothing to learn")
    return found


def _from_hub(source: str) -> IterableDataset:
    if Path(source).suffix in SUFFIXES or source.startswith((".", "/", "~")) or source.endswith("/"):
        raise SystemExit(f"--dataset: there is no file or folder {source}")
    try:
        return load_dataset(source, split="train", streaming=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"--dataset: there is no file or folder {source}, and the hub says: {reason}") from error


def _read(files: list[str]):
    """The documents in files, in order. The readers of `datasets` do not say which file and line is amiss, and want the
    same columns everywhere."""
    for file in files:
        try:
            for row in _rows(Path(file)):
                if not isinstance(row, dict):
                    raise SystemExit(f'{file}: a document is {str(row)[:60]!r}; write it as {{"text": "..."}}')
                yield row
        except UnicodeDecodeError as error:
            raise SystemExit(f"{file} is not UTF-8 ({error.reason}): save it as UTF-8") from error
        except pyarrow.ArrowInvalid as error:
            raise SystemExit(f"{file} cannot be read as Parquet: {error}") from error


def _rows(file: Path):
    kind = file.suffix.lower()
    if kind == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=100):
            yield from batch.to_pylist()
    elif kind in (".json", ".jsonl"):
        yield from _json_rows(file, kind)
    else:
        yield {"text": file.read_text(encoding="utf-8-sig")}


def _json_rows(file: Path, kind: str):
    with file.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        if kind == ".json" and (first.lstrip()[:1] == "[" or first.strip() == "{"):  # one value over many lines
            value = _parse(lines.read(), file)
            yield from value if isinstance(value, list) else [value]
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, file, number)


def _parse(text: str, file: Path, number: int = 1):
    try:
        return json.loads(text.rstrip())  # else a value that is cut short would be amiss on the line after
    except json.JSONDecodeError as error:
        where = f"{file}, line {number + error.lineno - 1}"
        raise SystemExit(f"{where}, is not JSON ({error.msg}): mend or remove that line") from error


def tokenize(row: dict, tokenizer, column: str = "text") -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels of one document: the text in `column`, or the chat in "messages".

    A text, which may be null, ends with the end-of-text token, where the tokenizer has one, and is learned whole. Of a
    chat the assistant's words alone are learned, where the tokenizer's chat template marks them with {% generation %};
    else all of it is.
    """
    if row.get("messages") is not None:
        return _tokenize_chat(row["messages"], tokenizer)
    if column not in row and "messages" not in row:
        raise SystemExit(f"a document has the columns {sorted(row)}, and neither {column!r} nor 'messages'")
    text = row.get(column) or ""
    if not isinstance(text, str):
        raise SystemExit(f"{column!r} of a document is {str(text)[:60]}, a {type(text).__name__}; it must be text")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = np.array([*tokenizer(text, verbose=False)["input_ids"], *end], dtype=np.int64)
    return ids, ids


def _tokenize_chat(messages: list[dict], tokenizer) -> tuple[np.ndarray, np.ndarray]:
    if not messages:
        return np.array([], dtype=np.int64), np.array([], dtype=np.int64)
    marked = _marks_the_assistant(tokenizer.chat_template or "")
    if not marked and tokenizer.chat_template:
        _say_that_all_is_learned(tokenizer)
    try:
        chat = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=marked, tokenizer_kwargs={"verbose": False}
        )
    except Exception as error:  # whatever the template raises, in words of its own
        raise SystemExit(
            f"a chat does not fit the tokenizer's chat template ({str(error).splitlines()[0]}). It is to be a list of"
            f' {{"role": "user", "content": "..."}}, and this one is {str(messages)[:200]}'
        ) from error
    ids = np.array(chat["input_ids"], dtype=np.int64)
    return ids, np.where(chat["assistant_masks"], ids, IGNORED) if marked else ids


def _marks_the_assistant(template: str) -> bool:
    """Whether a chat template says which words are the assistant's."""
    return re.search(r"\{%-?\s*generation", template) is not None


@functools.cache
def _say_that_all_is_learned(tokenizer) -> None:
    """Print, once in a process, what follows from a chat template without marks, and what would give them."""
    if int(os.environ.get("RANK", 0)) != 0:
        return
    try:
        with_assistant_marked(tokenizer)
        advice = "recipes/finetune_checkpoint.py --learn assistant takes TRL's version of it."
    except SystemExit as reason:
        advice = f"For {reason}."
    print(f"Note: this chat template marks no assistant words ({{% generation %}}), so all words are learned. {advice}")


def with_assistant_marked(tokenizer):
    """A copy of the tokenizer whose chat template marks the assistant's words, by TRL's version of that template.

    The original is what goes beside the trained model. Raises SystemExit where TRL is not installed, or has none.
    """
    try:
        from trl.chat_template_utils import get_training_chat_template
    except (ImportError, RuntimeError) as error:  # the latter where TRL lacks a library, or finds another release of it
        raise SystemExit("--learn assistant: TRL has the chat templates with marks; pip install trl") from error
    try:
        template = get_training_chat_template(tokenizer)
    except Exception as error:  # TRL's own, and whatever the template raises where TRL tries it
        raise SystemExit(
            "--learn assistant: TRL does not know this chat template; put {% generation %} and {% endgeneration %}"
            " around the assistant's words in the checkpoint's chat template"
        ) from error
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = template or tokenizer.chat_template  # None: it has the marks
    return marked


def long_sequences(
    documents: IterableDataset,
    tokenizer,
    seq_len: int,
    *,
    column: str = "text",
    keep_documents: bool = False,
    repeat: bool = True,
    num_ranks: int = 1,
) -> IterableDataset:
    """Documents joined in order and cut to `seq_len` tokens: rows of `input_ids`, `labels`, `position_ids` (int64).

    Args:
        keep_documents: positions restart at each document, which keeps attention inside of it (packing). Else positions
            run through and attention crosses the seams.
        repeat: begin again after the last document, without end. Else what is left over at the end is dropped.
        num_ranks: processes that share the stream, each sequence going to one of them. Accelerate gives a process its
            part where `dispatch_batches` is False; where it is True one process reads for all of them.

    Raises:
        SystemExit: while reading, where all documents together do not make one sequence with something to learn.
    """
    return IterableDataset.from_generator(
        _of_ranks,
        gen_kwargs={
            "ranks": list(range(num_ranks)),  # a list: this is what datasets splits
            "num_ranks": num_ranks,
            "cutting": dict(
                documents=documents,
                tokenizer=tokenizer,
                seq_len=seq_len,
                column=column,
                keep_documents=keep_documents,
                repeat=repeat,
            ),
        },
    )


def _of_ranks(ranks, num_ranks, cutting):
    """Every `num_ranks`-th sequence. A round that not all ranks have a sequence of is dropped: none must wait."""
    held = []
    for index, sequence in enumerate(_cut(**cutting)):
        if index % num_ranks in ranks:
            held.append(sequence)
        if (index + 1) % num_ranks == 0:
            yield from held
            held = []


def _cut(documents, tokenizer, seq_len, column, keep_documents, repeat):
    pieces, num_tokens, num_sequences = [], 0, 0  # the first two are of the sequence that is being filled
    for _ in itertools.count() if repeat else range(1):
        num_seen = num_learned = 0
        for row in documents:
            ids, labels = tokenize(row, tokenizer, column)
            num_seen += len(ids)
            num_learned += int((labels[int(keep_documents) :] != IGNORED).sum())
            while len(ids):
                take = min(len(ids), seq_len - num_tokens)
                pieces.append((ids[:take], labels[:take]))
                ids, labels, num_tokens = ids[take:], labels[take:], num_tokens + take
                if num_tokens == seq_len:
                    sequence = _join(pieces, keep_documents)
                    pieces, num_tokens = [], 0
                    if (sequence["labels"][1:] != IGNORED).any():  # nothing predicts the first token
                        num_sequences += 1
                        yield sequence
        if not num_sequences:
            if not num_learned:
                advice = "a text needs words, and a chat some of the assistant's"
            elif num_seen < seq_len:
                advice = too_short(num_seen)
            else:
                advice = "the cuts leave no sequence a word to learn: take another --seq_len"
            raise SystemExit(
                f"the text has {num_seen:,} tokens, {num_learned:,} of them to be learned, and one sequence takes"
                f" {seq_len:,}: {advice}"
            )


def too_short(num_tokens: int) -> str:
    """What to do where a text of so many tokens makes no sequence, with a round length that fits."""
    return f"give more text, or --seq_len {2 ** (max(num_tokens, 2).bit_length() - 1)}"


def _join(pieces, keep_documents: bool) -> dict[str, np.ndarray]:
    ids, labels = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    positions = np.arange(len(ids))
    if keep_documents:
        lengths = [len(piece) for piece, _ in pieces]
        starts = np.cumsum([0, *lengths[:-1]])
        positions = positions - np.repeat(starts, lengths)
        labels = labels.copy()
        labels[starts] = IGNORED  # else the end of one document would learn to predict the beginning of the next
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def check_positions(model, seq_len: int) -> None:
    """Say that positions up to `seq_len` are new to `model`, where they are. Exits where it has none for them."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or seq_len
    if seq_len <= longest:
        return
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    if any(longest <= table.num_embeddings <= longest + 2 for table in tables):  # learned; some models count from 2
        raise SystemExit(f"--seq_len is {seq_len:,} and the model has positions for {longest:,} tokens: lower it")
    print(
        f"Note: the model was made for {longest:,} positions; those up to {seq_len:,} are extrapolated."
        " recipes/llama7b_1m.py scales them with --rope."
    )


def stretch_positions(config, seq_len: int, kind: str) -> None:
    """Scale the rotary positions of a model's `config`, in place, so that `seq_len` tokens fit those it was trained at.

    Args:
        kind: "yarn" or "linear", as transformers names them.

    Raises:
        SystemExit: the model has no rotary positions, scales them already, or has several kinds.
    """
    trained, rope = config.max_position_embeddings, getattr(config, "rope_parameters", None)
    if seq_len <= trained:
        return
    if not rope or rope.get("rope_type") != "default":
        raise SystemExit(
            f"--rope {kind}: rope_parameters is {rope}, which is not to be scaled; edit config.json instead"
        )
    config.rope_parameters = {
        **rope,
        "rope_type": kind,
        "factor": seq_len / trained,
        "original_max_position_embeddings": trained,
    }
    config.max_position_embeddings = seq_len
