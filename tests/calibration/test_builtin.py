import hashlib
import itertools
import os
import sys

import pytest

from kvq.calibration.builtin import BuiltinCorpus, builtin_table
from kvq.errors import InputError

DOCSTRING = "A module with enough prose to be kept. " * 6
CODE = "x = 1\n" * 50


def texts(corpus: BuiltinCorpus) -> list[str]:
    return [row["text"] for row in corpus]


def write(root, name, content=f'"""{DOCSTRING}"""\n\n{CODE}'):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_corpus_is_enough_for_the_default_options():
    characters = sum(len(text) for text in texts(BuiltinCorpus(0)))
    assert characters >= 6 * 512 * 2048  # more than any trained tokenizer puts in one token


def test_same_seed_same_documents():
    first, again = ([*itertools.islice(BuiltinCorpus(3), 20)] for _ in range(2))
    other = [*itertools.islice(BuiltinCorpus(4), 20)]
    assert first == again != other


def test_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    for name in "abcdef":
        write(tmp_path, f"{name}.py", f'"""{name} {DOCSTRING}"""\n{CODE}')
    expected = texts(BuiltinCorpus(0, tmp_path))
    walk = os.walk

    def backwards(root):
        for folder, folders, files in walk(root):
            yield folder, folders, files[::-1]

    monkeypatch.setattr("kvq.calibration.builtin.os.walk", backwards)
    assert texts(BuiltinCorpus(0, tmp_path)) == expected


def test_a_module_gives_prose_and_the_rest_of_its_code(tmp_path):
    source = f'"""{DOCSTRING}"""\n{CODE}\n\ndef f():\n    """Inner prose."""\n    return 2\n'
    write(tmp_path, "a.py", source)
    prose, code = texts(BuiltinCorpus(0, tmp_path))
    assert prose.startswith("A module")
    assert prose.endswith("Inner prose.")
    assert '"""' not in code
    assert "def f():\n    return 2" in code


def test_docstring_on_the_line_of_its_function_keeps_the_function(tmp_path):
    write(tmp_path, "a.py", f'{CODE}\ndef f(): "prose"\n')
    assert 'def f(): "prose"' in texts(BuiltinCorpus(0, tmp_path))[-1]


@pytest.mark.parametrize(
    "name",
    [
        "test/a.py",
        "json/tests/a.py",
        "idlelib/a.py",
        "lib2to3/a.py",
        "site-packages/a.py",
        "dist-packages/a.py",
        "__pycache__/a.py",
        "config-3.11/a.py",
        "_sysconfigdata_linux.py",
        "sitecustomize.py",
        "notes.txt",
    ],
)
def test_tests_and_foreign_files_are_skipped(tmp_path, name):
    write(tmp_path, name)
    write(tmp_path, "kept.py", f"y = 2\n{CODE}")
    assert texts(BuiltinCorpus(0, tmp_path)) == [f"y = 2\n{CODE}"]


@pytest.mark.parametrize(
    "content", [b"# \xe9\n" + CODE.encode(), b"def (\n" + CODE.encode(), b"x = 1\n"]
)
def test_files_that_are_no_text_no_python_or_too_short_are_skipped(tmp_path, content):
    write(tmp_path, "a.py", content)
    assert texts(BuiltinCorpus(0, tmp_path)) == []


def test_old_escapes_raise_no_warning(tmp_path):
    write(tmp_path, "a.py", f'x = "\\d"\n{CODE}')
    assert len(texts(BuiltinCorpus(0, tmp_path))) == 1


def test_a_long_module_is_cut(tmp_path):
    write(tmp_path, "a.py", "x = 1\n" * 50_000)
    assert len(texts(BuiltinCorpus(0, tmp_path))[0]) == 65_536


def test_library_without_sources_is_refused(tmp_path):
    with pytest.raises(InputError) as refused:
        texts(BuiltinCorpus(0, tmp_path))
    assert refused.value.code == "data.builtin"
    assert "--dataset" in refused.value.hint


def test_identity_names_the_interpreter_and_the_documents_drawn(tmp_path):
    write(tmp_path, "a.py")
    corpus = BuiltinCorpus(0, tmp_path)
    drawn = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts(corpus))
    identity = corpus.identity()
    assert ".".join(map(str, sys.version_info[:3])) in identity["python"]
    assert identity["documents"] == len(drawn) == 2
    assert identity["corpus_digest"] == hashlib.sha256("".join(drawn).encode()).hexdigest()


def test_reading_twice_counts_once(tmp_path):
    write(tmp_path, "a.py")
    corpus = BuiltinCorpus(0, tmp_path)
    assert texts(corpus) == texts(corpus)
    assert corpus.identity()["documents"] == 2


def test_split_is_refused():
    with pytest.raises(InputError, match="`train`") as refused:
        builtin_table(0, "train")
    assert refused.value.code == "data.builtin_split"
