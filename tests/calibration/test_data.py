import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvq.calibration.data import DataOptions, load
from kvq.errors import InputError, MissingDependencyError

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

BOS, EOS = 0, 1
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if date %}{{ strftime_now('%Y') }}{% endif %}"
)
WORDS = "the quick brown fox jumps over a lazy dog near some river"


def make_tokenizer(**options):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS] * 4, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    options = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 16} | options
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **options)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(chat_template=TEMPLATE)


def jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(dataset, tokenizer, *, max_length=None, vocab_size=1000, **options):
    options = {"seq_len": 8, "num_samples": 3} | options
    chosen = DataOptions(dataset=str(dataset), **options)
    return load(chosen, tokenizer, max_length=max_length, vocab_size=vocab_size)


def ids(data):
    return [sequence.token_ids.tolist() for sequence in data.sequences]


def encoded(tokenizer, text, special=True):
    return ([BOS] if special else []) + tokenizer.backend_tokenizer.encode(
        text, add_special_tokens=False
    ).ids


def refused(code, dataset, tokenizer, **options):
    with pytest.raises(InputError) as caught:
        read(dataset, tokenizer, **options)
    error = caught.value
    assert error.code == code, str(error)
    assert error.hint
    assert not str(error).endswith(".")
    return f"{error} | {error.hint}"


CHAT = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]
CHAT_TEXT = "<s>[user]the fox[assistant]a dog"


def chat_ids(tokenizer, text=CHAT_TEXT):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


# rows


def test_packed_rows_are_joined_with_eos_and_cut(tmp_path, tokenizer):
    rows = [WORDS, "a dog", WORDS, WORDS]
    data = read(jsonl(tmp_path / "a.jsonl", [{"text": row} for row in rows]), tokenizer)
    joined = []
    for row in rows:
        joined += ([EOS] if joined else []) + encoded(tokenizer, row)
    assert ids(data) == [joined[0:8], joined[8:16], joined[16:24]]
    assert data.identity["packed"] is True
    assert data.notices == ()


def test_unpacked_rows_are_cut_and_counted(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": WORDS}, {"text": "a dog"}, {"text": WORDS}])
    data = read(path, tokenizer, pack=False)
    rows = [encoded(tokenizer, text) for text in (WORDS, "a dog", WORDS)]
    assert ids(data) == [row[:8] for row in rows]
    assert data.identity["rows_truncated"] == 2
    assert data.notices == ("2 of 3 rows are longer than 8 tokens and were cut.",)


def test_reading_stops_when_there_are_enough(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": WORDS}] * 200)
    assert read(path, tokenizer, pack=False).identity["rows_read"] == 3
    length = len(encoded(tokenizer, WORDS))
    assert read(path, tokenizer).identity["rows_read"] == -(-24 // (length + 1))


def test_input_ids_are_used_as_they_are(tmp_path):
    rows = [
        {"input_ids": [5, 6, 7], "messages": CHAT, "n": 1},
        {"input_ids": list(range(12)), "messages": CHAT, "n": 2},
    ]
    data = read(jsonl(tmp_path / "a.jsonl", rows), None)
    assert ids(data) == [[5, 6, 7], list(range(8))]
    assert data.identity["kind"] == "input_ids"
    assert data.identity["packed"] is False
    assert data.identity["rows_truncated"] == 1
    assert "2 sequences of the 3 asked for: 2 rows hold 15 tokens." in data.notices


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_chats_go_through_the_template_with_one_bos(tmp_path, tokenizer, column):
    data = read(jsonl(tmp_path / "a.jsonl", [{column: CHAT, "text": "x"}]), tokenizer, pack=False)
    assert ids(data) == [chat_ids(tokenizer)[:8]]
    assert ids(data)[0].count(BOS) == 1
    assert data.identity["chat_template"] is True


def test_from_and_value_read_like_role_and_content(tmp_path, tokenizer):
    chat = [{"from": "human", "value": "the fox"}, {"from": "gpt", "value": "a dog"}]
    path = jsonl(tmp_path / "a.jsonl", [{"conversations": chat}])
    assert ids(read(path, tokenizer, pack=False, seq_len=99)) == [chat_ids(tokenizer)]


def test_named_text_column_goes_before_chats_and_ids(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [5], "messages": CHAT, "body": "a dog"}])
    data = read(path, tokenizer, pack=False, text_column="body")
    assert ids(data) == [encoded(tokenizer, "a dog")]


def test_named_column_of_chats_is_read_as_chats(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"turns": CHAT}])
    data = read(path, tokenizer, pack=False, seq_len=99, text_column="turns")
    assert ids(data) == [chat_ids(tokenizer)]


def test_required_template_goes_before_ids(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [5], "messages": CHAT}])
    assert read(path, tokenizer, pack=False, chat_template=True).identity["kind"] == "chat"


def test_no_chat_template_reads_the_text_column(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT, "text": "a dog"}])
    data = read(path, tokenizer, pack=False, chat_template=False)
    assert ids(data) == [encoded(tokenizer, "a dog")]
    assert data.identity["chat_template"] is False


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"content": "a fox", "n": 1}, "a fox"),
        ({"article": "a fox", "summary": "x"}, "a fox"),
        ({"prompt": "a fox", "completion": "a dog"}, "a fox\na dog"),
        ({"prompt": "a fox", "response": "a dog"}, "a fox\na dog"),
        ({"instruction": "a fox", "input": "", "output": "a dog"}, "a fox\na dog"),
        ({"instruction": "a fox", "output": "a dog"}, "a fox\na dog"),
        ({"prompt": "a fox"}, "a fox"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_text_columns_are_found(tmp_path, tokenizer, row, text):
    data = read(jsonl(tmp_path / "a.jsonl", [row]), tokenizer, pack=False, seq_len=99)
    assert ids(data) == [encoded(tokenizer, text)]


def test_empty_rows_are_skipped_and_counted(tmp_path, tokenizer):
    rows = [{"text": ""}, {"text": " \n"}, {"text": None}, {"text": "a dog"}]
    data = read(jsonl(tmp_path / "a.jsonl", rows), tokenizer, pack=False, num_samples=1)
    assert data.identity["rows_skipped_empty"] == 3
    assert data.identity["rows_read"] == 4
    assert data.notices == ("3 of 4 rows are empty and were skipped.",)


def test_empty_chats_and_ids_are_skipped(tmp_path, tokenizer):
    silent = [{"role": "user", "content": " "}]
    chats = jsonl(tmp_path / "a.jsonl", [{"messages": m} for m in ([], silent, CHAT)])
    assert read(chats, tokenizer, pack=False).identity["rows_skipped_empty"] == 2
    rows = jsonl(tmp_path / "b.jsonl", [{"input_ids": i} for i in ([], None, [3])])
    assert ids(read(rows, None)) == [[3]]


def test_padding_side_and_pad_token_change_nothing(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a dog"}, {"text": WORDS}])
    kinds = ({}, {"padding_side": "left"}, {"padding_side": "right", "pad_token": "</s>"})
    found = [
        ids(read(path, make_tokenizer(**options), pack=pack))
        for pack in (True, False)
        for options in kinds
    ]
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4] == found[5]


def test_padding_set_in_the_tokenizer_itself_is_ignored(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a dog"}, {"text": WORDS}])
    padding = make_tokenizer()
    padding.backend_tokenizer.enable_padding(length=64)
    padding.backend_tokenizer.enable_truncation(2)
    assert ids(read(path, padding, pack=False)) == ids(read(path, tokenizer, pack=False))


def test_long_rows_print_no_warning(tmp_path, tokenizer, caplog, capsys):
    read(jsonl(tmp_path / "a.jsonl", [{"text": WORDS * 20}]), tokenizer, pack=False)
    assert caplog.text == ""
    assert capsys.readouterr() == ("", "")


def test_the_date_in_a_template_is_fixed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    dated = make_tokenizer(chat_template=TEMPLATE.replace("{% if date %}", "{% if true %}"))
    data = read(path, dated, pack=False, seq_len=99)
    assert ids(data) == [chat_ids(dated, CHAT_TEXT + "2024")]


# sources


def test_file_types_agree(tmp_path, tokenizer):
    rows = [{"text": WORDS, "n": 1}, {"text": "a lazy dog", "n": 2}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.to_csv(str(tmp_path / "a.csv"))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "A.TXT").write_text(f"\n{WORDS}\n\n \t\n\na lazy dog\n\n")
    jsonl(tmp_path / "a.jsonl", rows)
    names = ["a.jsonl", "a.json", "a.parquet", "a.csv", "A.TXT"]
    loaded = [read(tmp_path / name, tokenizer, pack=False) for name in names]
    assert {data.identity["digest"] for data in loaded} == {loaded[0].identity["digest"]}
    assert [data.identity["rows_read"] for data in loaded] == [2] * 5


def test_txt_document_keeps_its_line_breaks(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa fox\r\na dog\r\n\r\nthe river")
    data = read(tmp_path / "a.txt", tokenizer, pack=False, seq_len=99)
    assert ids(data) == [encoded(tokenizer, "a fox\na dog"), encoded(tokenizer, "the river")]


def test_path_with_glob_characters_is_one_file(tmp_path, tokenizer):
    folder = tmp_path / "we[1]rd *"
    folder.mkdir()
    data = read(jsonl(folder / "a [b].jsonl", [{"text": "a dog"}]), tokenizer, pack=False)
    assert ids(data) == [encoded(tokenizer, "a dog")]


@pytest.mark.parametrize(
    ("split", "kept"),
    [
        (None, slice(0, 3)),
        ("train", slice(0, 3)),
        ("train[:2]", slice(0, 2)),
        ("train[10%:20%]", slice(2, 4)),
        ("train[-1:]", slice(19, 20)),
    ],
)
def test_split_syntax(tmp_path, split, kept):
    rows = [{"input_ids": [row]} for row in range(20)]
    data = read(jsonl(tmp_path / "a.jsonl", rows), None, split=split)
    assert ids(data) == [row["input_ids"] for row in rows[kept]]
    assert data.identity["split"] == (split or "train")


def test_splits_are_added(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [row]} for row in range(20)])
    assert ids(read(path, None, split="train[-1:]+train[:1]")) == [[19], [0]]


def test_saved_folders(tmp_path):
    train = datasets.Dataset.from_dict({"input_ids": [[1], [2]]})
    test = datasets.Dataset.from_dict({"input_ids": [[3]]})
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": test, "train": train}).save_to_disk(tmp_path / "two")
    one, two = (read(tmp_path / name, None) for name in ("one", "two"))
    assert ids(one) == ids(two) == [[1], [2]]
    assert ids(read(tmp_path / "two", None, split="test")) == [[3]]
    assert one.identity["source"]["type"] == "folder"
    assert one.identity["source"]["name"] == "one"


def test_builtin_needs_no_datasets_library(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = read("builtin", tokenizer, seq_len=64, num_samples=5)
    assert [len(sequence) for sequence in data.sequences] == [64] * 5
    assert data.identity["source"]["type"] == "builtin"
    assert data.identity["split"] is None
    assert len(data.notices) == 1
    assert "--dataset" in data.notices[0]


def test_builtin_depends_on_the_seed_only(tokenizer):
    same, again, other = (
        read("builtin", tokenizer, seq_len=64, seed=seed).identity for seed in (0, 0, 1)
    )
    assert same == again
    assert same["digest"] != other["digest"]


def test_hub_set_uses_train_when_there_are_several(monkeypatch):
    splits = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"input_ids": [[n]]}) for n, name in enumerate("ab")}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    assert ids(read("some/set", None, split="b")) == [[1]]
    assert "`a`, `b`" in refused("data.split", "some/set", None)
    splits["train"] = datasets.Dataset.from_dict({"input_ids": [[9]]})
    data = read("some/set", None)
    assert ids(data) == [[9]]
    assert data.identity["source"] == {"type": "hub", "name": "some/set"}


def test_hub_set_with_one_split_uses_it(monkeypatch):
    splits = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"input_ids": [[7]]})})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    assert read("some-set", None).identity["split"] == "test"


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), FileNotFoundError("unknown"), ValueError("pick one")]
)
def test_hub_failures_name_local_data(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    text = refused("data.unreachable", "some/set", None)
    assert str(error) in text
    assert ".jsonl" in text
    assert "`builtin`" in text


def test_offline_hub_id_is_unreachable(tmp_path):
    code = (
        "from kvq.calibration.data import DataOptions, load\n"
        "from kvq.errors import InputError\n"
        "try: load(DataOptions(dataset='some/set'), None, max_length=None, vocab_size=9)\n"
        "except InputError as error: print(error.code)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "data.unreachable\n"


def test_local_file_leaves_nothing_and_imports_no_torch(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])
    code = (
        "import sys\n"
        "import kvq.calibration.data as data\n"
        "loaded = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        f"options = data.DataOptions(dataset={str(tmp_path / 'a.jsonl')!r})\n"
        "data.load(options, None, max_length=None, vocab_size=9)"
    )
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "tmp").mkdir()
    env = {"HOME": str(home), "TMPDIR": str(tmp_path / "tmp"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    left = [path.name for folder in (home, tmp_path / "tmp") for path in folder.rglob("*.arrow")]
    assert left == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (home / ".cache" / "huggingface" / "datasets").exists()


@pytest.mark.parametrize("disabled", [True, False])
def test_settings_of_datasets_are_restored(tmp_path, disabled):
    before = datasets.are_progress_bars_disabled()
    switch = datasets.disable_progress_bars if disabled else datasets.enable_progress_bars
    switch()
    try:
        read(jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}]), None)
        assert datasets.are_progress_bars_disabled() is disabled
        refused("data.input_ids", jsonl(tmp_path / "b.jsonl", [{"input_ids": "x"}]), None)
        assert datasets.are_progress_bars_disabled() is disabled
    finally:
        (datasets.disable_progress_bars if before else datasets.enable_progress_bars)()


# identity


def test_identity_is_json_and_names_no_path(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a fox", "completion": WORDS}] * 3)
    identity = read(path, tokenizer, seed=7).identity
    assert json.loads(json.dumps(identity)) == identity
    assert str(tmp_path) not in json.dumps(identity)
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    assert identity["source"] == {"type": "file", "name": "a.jsonl", "sha256": content}
    assert identity["column"] == "prompt+completion"
    assert identity["kind"] == "text"
    assert (identity["seq_len"], identity["seed"]) == (8, 7)
    assert (identity["sequences"], identity["tokens"]) == (3, 24)


def test_digest_is_the_sequences_in_any_order(tmp_path):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    data = read(jsonl(tmp_path / "a.jsonl", rows), None)
    again = read(jsonl(tmp_path / "b.jsonl", rows[::-1]), None)
    digests = "".join(sorted(sequence.digest for sequence in data.sequences))
    assert data.identity["digest"] == hashlib.sha256(digests.encode()).hexdigest()
    assert data.identity["digest"] == again.identity["digest"]


# errors


@pytest.mark.parametrize(
    ("option", "value"),
    [("seq_len", 0), ("seq_len", -1), ("num_samples", 0), ("num_samples", -5), ("min_tokens", -1)],
)
def test_numbers_out_of_range(tokenizer, option, value):
    assert f"is {value}" in refused(f"data.{option}", "builtin", tokenizer, **{option: value})


def test_seq_len_above_the_model(tokenizer):
    text = refused("data.seq_len", "builtin", tokenizer, seq_len=33, max_length=32)
    assert "33" in text
    assert "32" in text


def test_builtin_has_no_splits(tokenizer):
    refused("data.builtin_split", "builtin", tokenizer, split="train")


@pytest.mark.parametrize(
    "name", ["nope.jsonl", "./nope", "some/nope.txt", "/nope/x", "a/b/c", "~/nope", "notes.log"]
)
def test_missing_file(name):
    assert name in refused("data.no_file", name, None)


def test_unknown_file_type(tmp_path):
    (tmp_path / "a.xlsx").write_text("x")
    assert ".parquet" in refused("data.file_type", tmp_path / "a.xlsx", None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\nnope{\n'),
        ("a.jsonl", b""),
        ("a.parquet", b"text"),
        ("a.txt", b"\xff\xfe"),
        ("a.csv", b""),
    ],
)
def test_damaged_file(tmp_path, name, content, capsys):
    (tmp_path / name).write_bytes(content)
    assert f"`{name}`" in refused("data.unreadable", tmp_path / name, None)
    assert capsys.readouterr() == ("", "")


def test_folder_of_something_else(tmp_path):
    assert "save_to_disk" in refused("data.folder", tmp_path, None)


def test_file_needs_the_datasets_library(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError) as caught:
        read(path, None)
    assert caught.value.code == "dependency.datasets"
    assert 'pip install "kvq[calibrate]"' in caught.value.hint


@pytest.mark.parametrize("split", ["test", "train[", "", "train[:101%]", "train[a:b]"])
def test_unknown_split_lists_the_real_ones(tmp_path, split):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    assert "splits `train`" in refused("data.split", path, None, split=split)


def test_empty_split(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    assert "'train': 1" in refused("data.empty_split", path, None, split="train[1:]")
    (tmp_path / "a.csv").write_text("text\n")
    assert "no data" in refused("data.unreadable", tmp_path / "a.csv", None)
    (tmp_path / "a.txt").write_text("\n \n\n")
    refused("data.empty_split", tmp_path / "a.txt", None)


def test_unknown_text_column(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a", "n": 1}])
    text = refused("data.no_column", path, tokenizer, text_column="nope")
    assert "`text`, `n`" in text
    assert "`nope`" in text


def test_no_usable_column(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"label": 1, "title": "a"}])
    text = refused("data.no_text_column", path, tokenizer)
    assert "`label`, `title`" in text
    assert "--text-column" in text


def test_required_chats_are_missing(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    assert "`text`" in refused("data.no_chat_column", path, tokenizer, chat_template=True)


def test_chats_ruled_out_and_no_text(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    text = refused("data.chat_column", path, tokenizer, chat_template=False)
    assert "`messages`" in text
    assert "--no-chat-template" in text


def test_tokenizer_without_a_template(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    text = refused("data.no_chat_template", path, make_tokenizer())
    assert "--text-column" in text
    assert "--no-chat-template" in text


def test_template_that_refuses_a_row(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    strict = make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    text = refused("data.chat_template", path, strict)
    assert "row 0" in text
    assert "roles must alternate" in text


@pytest.mark.parametrize("dataset", ["builtin", "text", "chat"])
def test_no_tokenizer(tmp_path, dataset):
    rows = {"text": [{"text": "a"}], "chat": [{"messages": CHAT}]}
    if dataset in rows:
        dataset = jsonl(tmp_path / "a.jsonl", rows[dataset])
    assert "input_ids" in refused("data.no_tokenizer", dataset, None)


def test_no_eos(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": WORDS}])
    plain = make_tokenizer(eos_token=None)
    assert "--no-pack" in refused("data.no_eos", path, plain)
    assert len(read(path, plain, pack=False).sequences) == 1


def test_eos_outside_the_model(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": WORDS}])
    assert "EOS 1" in refused("data.no_eos", path, tokenizer, vocab_size=1)


@pytest.mark.parametrize("bad", [[[1, 2.5]], "x", 3, [["a"]], [[[1]]], [[True]]], ids=str)
def test_input_ids_that_are_no_integers(tmp_path, bad):
    value = bad[0] if isinstance(bad, list) else bad
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": value}])
    assert "row 0 of `input_ids`" in refused("data.input_ids", path, None)


@pytest.mark.parametrize("bad", [-1, 50])
def test_token_id_outside_the_vocabulary(tmp_path, bad):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}, {"input_ids": [2, bad]}])
    text = refused("data.token_id", path, None, vocab_size=50)
    assert f"row 1 has the token id {bad}, expected 0 to 49" in text


def test_tokenizer_of_another_model(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": WORDS}])
    refused("data.token_id", path, tokenizer, vocab_size=20)


def test_text_column_of_numbers(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    assert "`n`" in refused("data.row", path, tokenizer, text_column="n")


@pytest.mark.parametrize(
    "chat", [[{"content": "no role"}], ["words"], "words"], ids=["no-role", "strings", "text"]
)
def test_rows_that_are_no_chats(tmp_path, tokenizer, chat):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": chat}])
    assert "row 1 of `messages`" in refused("data.row", path, tokenizer)


def test_too_little_for_one_packed_sequence(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": ""}])
    tokens = len(encoded(tokenizer, "a"))
    text = refused("data.no_sequences", path, tokenizer, seq_len=2048)
    assert f"2 rows (1 empty) hold {tokens} tokens, one packed sequence needs 2048" in text
    assert "--seq-len" in text
    assert "--no-pack" in text


def test_nothing_but_empty_rows(tmp_path, tokenizer):
    path = jsonl(tmp_path / "a.jsonl", [{"text": " "}])
    refused("data.no_sequences", path, tokenizer, pack=False)


def test_too_few_tokens(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3]}])
    text = refused("data.too_few_tokens", path, None, min_tokens=4)
    assert "hold 3 tokens" in text
    assert read(path, None, min_tokens=3).identity["tokens"] == 3
