"""Long text for a model: documents as a stream of sequences, and positions beyond those that it was trained at.

Used by the recipes; copy it into your own project. Nothing is tokenized before it is needed and a process holds one
sequence at a time, so a sequence may have 1M tokens and the data may be larger than memory.
"""

import itertools
import re
import sysconfig
from pathlib import Path

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset

LOADERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
IGNORED = -100  # a label that the loss leaves out


def open_documents(source: str, shuffle_seed: int | None = None) -> IterableDataset:
    """The documents of `source`, one a row, read as they are needed.

    Args:
        source: a .txt, .md, .jsonl or .parquet file, a folder of them (a text file is one document), the name of a data
            set on the hub, or what comes with Python: "manual" (some 110,000 tokens) or "stdlib" (several million).
        shuffle_seed: draws files, and rows from a buffer of 100, in an order that this number decides. None: as given.

    Raises:
        SystemExit: a folder without such files.
    """
    if source == "manual":
        from pydoc_data.topics import topics

        documents = Dataset.from_dict({"text": list(topics.values())}).to_iterable_dataset()
    elif source == "stdlib":
        documents = _load("text", _stdlib_files())
    elif not Path(source).exists():
        documents = load_dataset(source, split="train", streaming=True)
    else:
        documents = concatenate_datasets([_load(loader, files) for loader, files in _files_by_loader(source).items()])
    return documents if shuffle_seed is None else documents.shuffle(seed=shuffle_seed, buffer_size=100)


def about_num_tokens(source: str) -> int | None:
    """Tokens of `source`, as for `open_documents`, at four bytes each; None where its size is not at hand."""
    if source == "manual":
        return sum(len(row["text"]) for row in open_documents(source)) // 4
    if source != "stdlib" and not Path(source).exists():
        return None
    found = {"text": _stdlib_files()} if source == "stdlib" else _files_by_loader(source)
    if "parquet" in found:  # compressed
        return None
    return sum(Path(file).stat().st_size for files in found.values() for file in files) // 4


def _stdlib_files() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    patterns = ("*.py", "asyncio/*.py", "email/*.py", "json/*.py")
    return sorted(str(file) for pattern in patterns for file in folder.glob(pattern))


def _files_by_loader(source: str) -> dict[str, list[str]]:
    files = sorted(Path(source).rglob("*")) if Path(source).is_dir() else [Path(source)]
    found = {}
    for file in files:
        if file.suffix in LOADERS:
            found.setdefault(LOADERS[file.suffix], []).append(str(file))
    if not found:
        raise SystemExit(f"{source}: no file there ends in one of {', '.join(LOADERS)}")
    return found


def _load(loader: str, files: list[str]) -> IterableDataset:
    options = {"sample_by": "document"} if loader == "text" else {}
    return load_dataset(loader, data_files=files, split="train", streaming=True, **options)


def tokenize(row: dict, tokenizer, column: str = "text") -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels of one document: the text in `column`, or the chat in "messages".

    A text ends with the end-of-text token and is learned whole. Of a chat the assistant's words alone are learned,
    where the tokenizer's chat template marks them with {% generation %}; else all of it is.
    """
    if row.get("messages") is not None:
        marked = re.search(r"\{%-?\s*generation", tokenizer.chat_template or "") is not None
        chat = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=marked, tokenizer_kwargs={"verbose": False}
        )
        ids = np.array(chat["input_ids"], dtype=np.int64)
        return ids, np.where(chat["assistant_masks"], ids, IGNORED) if marked else ids
    if row.get(column) is None:
        raise SystemExit(f"a document has the columns {sorted(row)}, and neither {column!r} nor 'messages'")
    ids = np.array([*tokenizer(row[column], verbose=False)["input_ids"], tokenizer.eos_token_id], dtype=np.int64)
    return ids, ids


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
            num_learned += int((labels != IGNORED).sum())
            while len(ids):
                take = min(len(ids), seq_len - num_tokens)
                pieces.append((ids[:take], labels[:take]))
                ids, labels, num_tokens = ids[take:], labels[take:], num_tokens + take
                if num_tokens == seq_len:
                    sequence = _join(pieces, keep_documents)
                    pieces, num_tokens = [], 0
                    if (sequence["labels"] != IGNORED).any():
                        num_sequences += 1
                        yield sequence
        if not num_sequences:
            raise SystemExit(
                f"the text has {num_seen:,} tokens, {num_learned:,} of them to be learned, and one sequence takes"
                f" {seq_len:,}: lower --seq_len"
            )


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
