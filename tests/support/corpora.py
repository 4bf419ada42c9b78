"""Small corpora for tests: stories in files of several kinds, and a bucket that fails."""
import contextlib
import hashlib
import json
import random
from unittest import mock

from fsspec.implementations.memory import MemoryFileSystem

from meshbook.data import grammar, vocabulary
from meshbook.data.corpus_plan import plan
from meshbook.data.vocabulary import END

TEXTS = [*grammar.stories(0, 200), "", "two\nlines", "naïve café 👩‍🚀", *grammar.stories(1, 100)]
ENCODING = vocabulary.learn(TEXTS, 400)


def write_inputs(folder, texts=TEXTS):
    """Two thirds of the texts as JSON lines, the others (none empty) as text."""
    at = len(texts) * 2 // 3
    lines = [json.dumps({"text": text, "number": n}) for n, text in enumerate(texts[:at])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", "utf8")
    (folder / "b.txt").write_text(END.join(texts[at:]), "utf8")
    return folder


def small_plan(*inputs, encoding=ENCODING, shard_tokens=3000, piece_bytes=5000, held_out=0.05):
    """A plan with about twenty pieces and about ten shards."""
    return plan(list(inputs), encoding, shard_tokens, piece_bytes, held_out)


def hashes(folder):
    """{name: SHA-256} of all files of a folder and those below it."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.glob("**/*") if path.is_file()}


@contextlib.contextmanager
def failing(seed, share):
    """Buckets in memory fail: this share of reads breaks off or comes short, of writes stays half.

    Yields the list of failures, which grows.
    """
    chance, failures = random.Random(seed), []
    read, write = MemoryFileSystem.cat_file, MemoryFileSystem.pipe_file

    def cat_file(self, path, *args, **kwargs):
        content = read(self, path, *args, **kwargs)
        if chance.random() < share:
            failures.append("read")
            if chance.random() < 0.5:
                raise OSError("connection reset")
            return content[:len(content) // 2]
        return content

    def pipe_file(self, path, content, *args, **kwargs):
        if chance.random() < share:
            failures.append("write")
            write(self, path, content[:len(content) // 2])
            raise OSError("connection lost")
        write(self, path, content, *args, **kwargs)

    with mock.patch.multiple(MemoryFileSystem, cat_file=cat_file, pipe_file=pipe_file):
        yield failures


def clear_memory():
    """Forget every object in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
