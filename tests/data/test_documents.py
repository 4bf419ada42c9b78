"""Pieces of inputs: every document in one, whatever the cuts, and bad input in a sentence."""
import json
import random

import pytest
from corpora import TEXTS, clear_memory, failing, write_inputs
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from meshbook.data import buckets, documents
from meshbook.data.documents import documents_of, find_inputs
from meshbook.data.vocabulary import END


def read_in_pieces(source, cuts, field="text"):
    edges = [0, *sorted(cuts), source.length]
    return [text for begin, end in zip(edges, edges[1:])
            for text in documents_of(source, begin, end, field)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return find_inputs(write_inputs(tmp_path_factory.mktemp("inputs")))


@pytest.mark.parametrize("step", [6, 13, 64, 1000, 10**6])
def test_every_document_once_and_in_order_for_pieces_of_any_size(inputs, step):
    found = [text for each in inputs
             for text in read_in_pieces(each, range(step, each.length, step))]
    assert found == TEXTS


@given(seed=st.integers(0, 2**32), block=st.sampled_from([1, 5, 13, 100, 1 << 20]))
@examples(12)
def test_every_document_once_and_in_order_for_any_cuts(inputs, seed, block):
    chance = random.Random(seed)
    for each in inputs:
        cuts = {chance.randrange(each.length) for _ in range(chance.randrange(60))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "BLOCK", block)
            found = read_in_pieces(each, cuts)
        assert found == [text for one in [each] for text in read_in_pieces(one, [])]


def test_a_cut_at_every_byte_of_a_separator(tmp_path):
    """A document begins behind a separator: a cut within one, before it and behind it."""
    (tmp_path / "x.txt").write_text(END.join(["one", "two", "three"]))
    (source,) = find_inputs(tmp_path)
    for cut in range(1, source.length):
        first, second = (list(documents_of(source, *part, "text"))
                         for part in ((0, cut), (cut, source.length)))
        assert first + second == ["one", "two", "three"]
        assert len(first) == 1 + (cut > 3 + len(END)) + (cut > 6 + 2 * len(END))


@pytest.mark.parametrize("block", [1, 5, 13, 1 << 20])
@pytest.mark.parametrize("name, content", [
    ("x.txt", f"{END}{END}one{END}{END}{END} {END}two{END}{END}"),
    ("x.txt", f"{END}one{END}{END}two"),
    ("x.jsonl", '\n\n{"text": "one"}\n\n\n \n{"text": "two"}\n\n'),
    ("x.jsonl", '{"text": "one"}\n\n{"text": "two"}')])
def test_a_cut_at_every_byte_between_records_without_content(
        tmp_path, monkeypatch, block, name, content):
    monkeypatch.setattr(documents, "BLOCK", block)
    (tmp_path / name).write_text(content)
    (source,) = find_inputs(tmp_path)
    for cut in range(1, source.length):
        for other in (cut, min(cut + 1, source.length), min(cut + 14, source.length)):
            assert read_in_pieces(source, [cut, other]) == ["one", "two"], (cut, other)


def test_blank_lines_and_space_around_texts_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n\n{"text": " a "}\r\n  \n{"text": ""}\n\n')
    (tmp_path / "b.txt").write_text(f"{END}\n x \n{END}{END}  {END}")
    found = [read_in_pieces(each, []) for each in find_inputs(tmp_path)]
    assert found == [[" a ", ""], ["x"]]


def test_parquet_row_groups_are_pieces(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as parquet

    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=17)
    (source,) = find_inputs(tmp_path / "x.parquet")
    assert source.length == -(-len(TEXTS) // 17)
    assert read_in_pieces(source, []) == read_in_pieces(source, [1, 2, 9]) == TEXTS
    with pytest.raises(ValueError, match="has no column 'body': found id, text"):
        read_in_pieces(source, [], "body")
    with pytest.raises(ValueError, match="row 0 has no text: expected a string in the column 'id'"):
        read_in_pieces(source, [], "id")
    (tmp_path / "y.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match="y.parquet is no Parquet file, or damaged"):
        find_inputs(tmp_path / "y.parquet")
    parquet.write_table(table.slice(0, 0), tmp_path / "z.parquet")
    with pytest.raises(ValueError, match="z.parquet is empty: expected documents, found none"):
        find_inputs(tmp_path / "z.parquet")
    parquet.write_table(pa.table({"text": ["fine", f"not {END}"]}), tmp_path / "w.parquet")
    with pytest.raises(ValueError, match="w.parquet, row 1 contains"):
        read_in_pieces(*find_inputs(tmp_path / "w.parquet"), [])


@pytest.mark.parametrize("line, said", [
    ('{"body": "x"}', "line 4 is a JSON object without a text 'text'"),
    ('["text"]', "line 4 is a JSON object without a text 'text'"),
    ('{"text": 5}', "line 4 is a JSON object without a text 'text'"),
    ('{"text": "x"', "line 4 is no JSON"),
    (f'{{"text": "a {END}"}}', "line 4 contains <|endoftext|>, which only separates")])
def test_a_bad_line_is_named(tmp_path, line, said):
    good = json.dumps({"text": "good"})
    (tmp_path / "x.jsonl").write_text(f"{good}\n\n{good}\n{line}\n{good}\n")
    (source,) = find_inputs(tmp_path)
    for cuts in ([], [20, 25, 40]):
        with pytest.raises(ValueError) as error:
            read_in_pieces(source, cuts)
        assert "x.jsonl" in str(error.value) and said in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"fine" + END.encode() + b"caf\xe9")
    with pytest.raises(ValueError, match="x.txt, document 2 is bytes that are not UTF-8"):
        read_in_pieces(*find_inputs(tmp_path), [])
    (tmp_path / "y.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(ValueError, match="y.jsonl, line 1 is bytes that are not UTF-8"):
        read_in_pieces(*find_inputs(tmp_path / "y.jsonl"), [])


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-16"])
@pytest.mark.parametrize("name, whole, where", [
    ("x.txt", "caf\u00e9 and more", "x.txt, document 1"),
    ("y.jsonl", '{"text": "more"}\n', "y.jsonl, line 1")])
def test_texts_of_wider_characters_are_refused_by_their_nul_bytes(
        tmp_path, code, name, whole, where):
    (tmp_path / name).write_bytes(whole.encode(code))
    with pytest.raises(ValueError, match=rf"{where} is bytes that are not UTF-8 \((NUL, as UTF-16 "
                                         r"and UTF-32 have it,|invalid \S+ byte) at its byte \d"):
        read_in_pieces(*find_inputs(tmp_path), [])


def test_a_nul_byte_is_named_by_its_place(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"fine" + END.encode() + b"ab\0c")
    with pytest.raises(ValueError, match=r"x.txt, document 2 .*\(NUL, as .* at its byte 2\)"):
        read_in_pieces(*find_inputs(tmp_path), [])
    (tmp_path / "x.txt").unlink()
    (tmp_path / "y.jsonl").write_text('{"text": "a\\u0000b"}\n')  # written as JSON wants it
    assert read_in_pieces(*find_inputs(tmp_path), []) == ["a\0b"]


@pytest.mark.parametrize("name, whole, expected", [
    ("x.txt", "one" + END + "\ufefftwo", ["one", "\ufefftwo"]),  # within a text it is a character
    ("y.jsonl", '{"text": "one"}\n{"text": "two"}\n', ["one", "two"])])
def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path, name, whole, expected):
    (tmp_path / name).write_text(whole, "utf-8-sig")
    with pytest.warns(UserWarning, match=f"{name} begins with a byte-order mark, which is left out"):
        assert read_in_pieces(*find_inputs(tmp_path), []) == expected


def test_inputs_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected files .jsonl, .ndjson, .txt, .parquet"):
        find_inputs(tmp_path)
    with pytest.raises(FileNotFoundError, match="no documents in .*none.jsonl"):
        find_inputs(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(ValueError, match="x.jsonl is empty: expected documents, found none"):
        find_inputs(tmp_path)
    (tmp_path / "x.doc").write_text("x")
    with pytest.raises(ValueError, match="x.doc is of an unknown kind: expected .jsonl"):
        find_inputs(tmp_path / "x.doc")


def test_a_pattern_names_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("x")
    found = [each.url.rpartition("/")[2] for each in find_inputs(tmp_path / "*.jsonl")]
    assert found == ["a.jsonl", "b.jsonl"]


def test_a_bucket_that_fails_for_a_moment_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "WAIT", 0)
    clear_memory()
    for path in write_inputs(tmp_path).iterdir():
        MemoryFileSystem().pipe_file(f"/bucket/{path.name}", path.read_bytes())
    sources = find_inputs("memory://bucket")
    read = lambda: [text for each in sources
                    for text in read_in_pieces(each, range(3000, each.length, 3000))]
    with failing(seed=2, share=0.2) as failures:
        assert read() == TEXTS
    assert len(failures) > 3
    with failing(seed=2, share=1.0), pytest.raises(
            OSError, match="a.jsonl could not be read: 4 attempts failed, the last with OSError"):
        read()
