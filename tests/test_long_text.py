"""Documents become sequences: every token once and in order, boundaries kept or not, each sequence on one rank."""

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, disable_progress_bars
from tiny_checkpoint import write_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, OPTConfig, default_data_collator

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import long_text  # noqa: E402

disable_progress_bars()
TEXTS = ["abc", "", "defgh", "ij"]  # with an end after each: 4, 1, 6 and 3 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def stream(rows, tokenizer, seq_len, **options):
    return long_text.long_sequences(Dataset.from_list(rows).to_iterable_dataset(), tokenizer, seq_len, **options)


def texts(tokenizer, seq_len, **options):
    return stream([{"text": text} for text in TEXTS], tokenizer, seq_len, **options)


def test_every_token_once_and_in_order(tokenizer):
    rows = list(texts(tokenizer, 4, repeat=False))
    joined = [tokenizer.decode(row["input_ids"]) for row in rows]
    assert joined == ["abc<end>", "<end>def", "gh<end>i"]  # two tokens are left over
    for row in rows:
        assert (row["labels"] == row["input_ids"]).all()
        assert row["position_ids"].tolist() == [0, 1, 2, 3]
        assert all(values.dtype == np.int64 for values in row.values())
    # A second pass joins on to the first: nothing is left over.
    repeated = "".join(tokenizer.decode(row["input_ids"]) for row in islice(texts(tokenizer, 4), 7))
    assert repeated == ("".join(f"{text}<end>" for text in TEXTS) * 2)


def test_kept_documents_restart_positions_and_do_not_learn_their_first_token(tokenizer):
    rows = list(texts(tokenizer, 7, keep_documents=True, repeat=False))
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 3, 0, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    for row in rows:
        starts = row["position_ids"] == 0
        assert (row["labels"][starts] == -100).all()
        assert (row["labels"][~starts] == row["input_ids"][~starts]).all()


def test_memo_hf_sees_the_kept_documents(tokenizer):
    from memo_hf.layers.documents import find_documents

    batch = default_data_collator(list(islice(texts(tokenizer, 7, keep_documents=True), 1)))
    assert find_documents(1, 7, position_ids=batch["position_ids"]).spans == ((0, 0, 4), (0, 4, 5), (0, 5, 7))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_sequence_goes_to_one_rank_and_no_rank_waits(tokenizer, num_ranks):
    whole = [row["input_ids"].tolist() for row in texts(tokenizer, 2, repeat=False)]
    assert len(whole) == 7
    shared = texts(tokenizer, 2, repeat=False, num_ranks=num_ranks)
    assert shared.num_shards == num_ranks  # as many as processes: accelerate then splits by shard
    ranks = [[row["input_ids"].tolist() for row in shared.shard(num_ranks, rank)] for rank in range(num_ranks)]
    rounds = len(whole) // num_ranks
    assert ranks == [whole[rank : rounds * num_ranks : num_ranks] for rank in range(num_ranks)]


def test_too_little_text_says_so(tokenizer):
    for repeat in (True, False):
        with pytest.raises(
            SystemExit, match="has 14 tokens, 14 of them to be learned, and one sequence takes 15: (.*)"
        ) as ended:
            list(texts(tokenizer, 15, repeat=repeat))
        assert str(ended.value).endswith(": give more text, or --seq_len 8")
    assert list(texts(tokenizer, 8, repeat=False))


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_of_a_chat_the_assistant_is_learned(tokenizer, capsys):
    ids, labels = long_text.tokenize(chat(("user", "hi"), ("assistant", "yo")), tokenizer)
    assert tokenizer.decode(ids) == "u:hi;a:yo;"
    assert labels.tolist() == [-100] * 7 + ids[7:].tolist()
    unmarked = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert capsys.readouterr().out == ""
    unmarked.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for _ in range(2):
        ids, labels = long_text.tokenize(chat(("user", "hi"), ("assistant", "yo")), unmarked)
        assert unmarked.decode(ids) == "hiyo" and (labels == ids).all()
    said = "Note: this chat template marks no assistant words ({% generation %}), so all words are learned. "
    told = capsys.readouterr().out
    assert told.startswith(f"{said}For --learn assistant: TRL does not know") and told.count("\n") == 1  # once
    fails = "{% for m in messages %}{{ raise_exception('no') if m.content == 'dummy' else m }}{% endfor %}"
    for template in (unmarked.chat_template, fails, None):  # TRL tries a template on messages of its own
        unmarked.chat_template = template
        with pytest.raises(SystemExit, match="TRL does not know this chat template; put {% generation %}"):
            long_text.with_assistant_marked(unmarked)


def test_of_a_known_chat_template_trl_marks_the_assistant(tokenizer, capsys):
    known = pytest.importorskip("trl.chat_template_utils").qwen2_5_chat_template
    unmarked = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template=known)
    marked, turns = long_text.with_assistant_marked(unmarked), chat(("user", "hi"), ("assistant", "yo"))
    ids, labels = long_text.tokenize(turns, marked)
    learned = tokenizer.decode(ids[labels != -100])
    assert "yo<|im_end|>" in learned and "hi" not in learned and "hi" in tokenizer.decode(ids)
    assert unmarked.chat_template == known and capsys.readouterr().out == ""
    long_text.tokenize(turns, unmarked)
    assert capsys.readouterr().out.endswith("finetune_checkpoint.py --learn assistant takes TRL's version of it.\n")
    assert long_text.with_assistant_marked(tokenizer).chat_template == tokenizer.chat_template


def test_a_sequence_without_anything_to_learn_is_left_out(tokenizer):
    rows = [chat(("user", "x" * 20), ("assistant", "y"))]  # 23 tokens of the user, then 4
    learned = list(stream(rows, tokenizer, 9, repeat=False))
    assert len(learned) == 1 and (learned[0]["labels"] != -100).sum() == 2
    with pytest.raises(SystemExit, match="28 tokens, 0 of them to be learned"):
        list(stream([chat(("user", "x" * 25))], tokenizer, 9))
    # The first token of a sequence is learned by nothing, so one with a label there alone has none.
    rows = [chat(("user", "x" * 14), ("assistant", "yo"), ("user", "z" * 6))]  # labels at 18, 19 and 20
    assert len(list(stream(rows, tokenizer, 20, repeat=False))) == 1
    with pytest.raises(SystemExit, match="to be learned, .*: take another --seq_len"):
        list(stream([chat(("user", "x" * 15), ("assistant", ""), ("user", "z" * 18))], tokenizer, 20, repeat=False))


def test_a_document_without_text_or_chat(tokenizer):
    with pytest.raises(SystemExit, match=r"columns \['body'\], and neither 'text' nor 'messages'"):
        list(stream([{"body": "x"}], tokenizer, 2))
    assert list(stream([{"body": "xyz"}], tokenizer, 2, column="body", repeat=False))


def test_local_files_of_several_kinds(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "deep/b.md").write_text("three\n\nfour")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "five\nsix"}) + "\n" + json.dumps({"text": "seven"}) + "\n")
    (tmp_path / "notes.pdf").write_text("no")
    everything = ["one\ntwo", "three\n\nfour", "five\nsix", "seven"]
    assert sorted(row["text"] for row in long_text.open_documents(str(tmp_path))) == sorted(everything)
    shuffled = [[row["text"] for row in long_text.open_documents(str(tmp_path), shuffle_seed=s)] for s in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2] and sorted(shuffled[2]) == sorted(everything)
    assert [row["text"] for row in long_text.open_documents(str(tmp_path / "a.txt"))] == ["one\ntwo"]
    counts = {"deep": 1, "a.txt": 1, "c.jsonl": None, ".": None, "none": None}
    assert {name: long_text.num_documents(str(tmp_path / name)) for name in counts} == counts
    assert long_text.num_documents("manual") == len(list(long_text.open_documents("manual")))
    assert long_text.about_num_tokens(str(tmp_path / "deep")) == len("three\n\nfour") // 4
    Dataset.from_dict({"text": ["eight"]}).to_parquet(tmp_path / "d.parquet")
    assert [row["text"] for row in long_text.open_documents(str(tmp_path / "d.parquet"))] == ["eight"]
    assert long_text.about_num_tokens(str(tmp_path)) is None and long_text.about_num_tokens("some/hub") is None
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat(("user", "hi"))) + "\n")
    (row,) = long_text.open_documents(str(tmp_path / "chats.jsonl"))
    assert row == chat(("user", "hi"))
    (tmp_path / "b.json").write_text(json.dumps([{"text": "nine"}, {"text": "ten"}], indent=2))
    (tmp_path / "B.JSON").write_text(json.dumps({"text": "eleven"}) + "\n\n" + json.dumps({"text": "twelve"}))
    for name, expected in (("b.json", ["nine", "ten"]), ("B.JSON", ["eleven", "twelve"])):
        assert [row["text"] for row in long_text.open_documents(str(tmp_path / name))] == expected
    everything += ["eight", "nine", "ten", "eleven", "twelve", None]  # the last is the chat
    assert {row.get("text") for row in long_text.open_documents(str(tmp_path))} == set(everything)


GOOD = json.dumps({"text": "some words " * 9})
MISTAKES = {
    "empty.jsonl": ("", r"empty.jsonl: empty, so there is nothing to learn"),
    "empty.txt": ("", r"/empty.txt: empty, so there is nothing to learn"),
    "null.jsonl": ('{"text": null}', "the text has 1 tokens, 0 of them to be learned, .*: a text needs words"),
    "latin.txt": ("\xe9".encode("latin-1"), "latin.txt is not UTF-8 .*: save it as UTF-8"),
    "latin.jsonl": ('{"text": "\xe9"}'.encode("latin-1"), "latin.jsonl is not UTF-8"),
    "broken.jsonl": (f'{GOOD}\n{{"text": "a\n{GOOD}', "broken.jsonl, line 2, is not JSON .*: mend or remove that line"),
    "broken.json": (f'[{GOOD},\n{{"text": ]', "broken.json, line 2, is not JSON"),
    "cut.jsonl": (f'{GOOD}\n{{"text": "a", \n', r"cut.jsonl, line 2, is not JSON"),
    "cut.json": (f'[{GOOD},\n{GOOD},\n', r"cut.json, line 2, is not JSON"),
    "number.json": ("5", r"number.json: a document is '5'; write it as \{\"text\": \"...\"\}"),
    "list.jsonl": ('{"text": ["a"]}', r"'text' of a document is \['a'\], a list; it must be text"),
    "no.parquet": ("no", "no.parquet cannot be read as Parquet"),
    "chat.jsonl": ('{"messages": [{"content": "hi"}]}', "does not fit the tokenizer's chat template .*'role'"),
    "user.jsonl": (json.dumps(chat(("user", "hi" * 20))), "0 of them .* and a chat some of the assistant's"),
    "nobody.jsonl": ('{"messages": []}', "the text has 0 tokens"),
    "notes.pdf": ("no", "no file there ends in one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_file_that_cannot_be_used_is_named(tokenizer, tmp_path, name):
    content, words = MISTAKES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=words):
        documents = long_text.open_documents(str(tmp_path / name), shuffle_seed=1)
        list(long_text.long_sequences(documents, tokenizer, 16, keep_documents=True, repeat=False))


def test_a_source_that_is_not_there(monkeypatch):
    with pytest.raises(SystemExit, match="--dataset: there is no file or folder books/a.txt"):
        long_text.open_documents("books/a.txt")
    with pytest.raises(SystemExit, match="--dataset: there is no file or folder books/$"):
        long_text.open_documents("books/")
    monkeypatch.setattr(
        long_text, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("offline\nand more"))
    )
    with pytest.raises(SystemExit, match="no file or folder some/name, and the hub says: offline$"):
        long_text.open_documents("some/name")


def test_tokenizers_without_an_end_or_a_chat_template(folder):
    bare = AutoTokenizer.from_pretrained(folder)
    bare.eos_token = bare.chat_template = None
    rows = list(stream([{"text": "abc"}, {"text": None}, {"text": "d"}], bare, 4, repeat=False))
    assert [bare.decode(row["input_ids"]) for row in rows] == ["abcd"]
    with pytest.raises(SystemExit, match="does not fit the tokenizer's chat template .*chat_template is not set"):
        list(stream([chat(("user", "hi"))], bare, 4))


def test_positions_that_a_model_does_not_have(folder, capsys):
    long_text.check_positions(AutoModelForCausalLM.from_pretrained(folder), 128)
    assert capsys.readouterr().out == ""
    long_text.check_positions(AutoModelForCausalLM.from_pretrained(folder), 129)
    assert "made for 128 positions; those up to 129 are extrapolated" in capsys.readouterr().out
    for config in (
        GPT2Config(n_positions=64, n_embd=8, n_head=1, n_layer=1, vocab_size=64),
        OPTConfig(max_position_embeddings=64, hidden_size=8, num_attention_heads=1, num_hidden_layers=1, ffn_dim=8),
    ):
        model = AutoModelForCausalLM.from_config(config)
        long_text.check_positions(model, 64)
        with pytest.raises(SystemExit, match="--seq_len is 65 and the model has positions for 64 tokens: lower it"):
            long_text.check_positions(model, 65)


def test_what_comes_with_python_needs_no_download():
    assert sum(len(row["text"]) for row in long_text.open_documents("manual")) > 400_000
    assert sum(len(row["text"]) for row in long_text.open_documents("stdlib")) > 4_000_000


def test_positions_are_stretched_to_the_length(folder):
    config = AutoConfig.from_pretrained(folder)
    long_text.stretch_positions(config, 128, "yarn")
    assert config.rope_parameters["rope_type"] == "default"
    long_text.stretch_positions(config, 512, "yarn")
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 4
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.max_position_embeddings == 512
    with pytest.raises(SystemExit, match="is not to be scaled"):
        long_text.stretch_positions(config, 1024, "yarn")
