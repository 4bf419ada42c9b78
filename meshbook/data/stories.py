"""Stories: TinyStories or the grammar's, in two sets that share none, as tokens.

    python -m meshbook.data.stories DIR    downloads TinyStories and GPT-2's vocabulary into DIR
"""
import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiktoken

from meshbook.data import grammar, vocabulary
from meshbook.data.token_files import Tokens, read_tokens, write_tokens
from meshbook.data.vocabulary import END

TRAIN, VALIDATION, SEED = 40_000, 2_000, 2023  # how many stories of the grammar, and which
LEARNED_FROM, SIZE = 5_000, 640  # stories that the stand-in's vocabulary is learned from; tokens

# The two files of Eldan and Li, 2023 (CDLA-Sharing-1.0), as they are since May 2023.
TINYSTORIES = {  # bytes, SHA-256: from the commit "Fix encoding problem" of the data set
    "TinyStories-valid.txt": (
        19_447_282, "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4"),
    "TinyStories-train.txt": (
        1_924_281_556, "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f"),
}
REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
MIRRORS = ("https://huggingface.co", "https://hf-mirror.com")


@dataclass(frozen=True, eq=False)
class Stories:
    """Two sets of stories without a common one, and what a reader must know of them."""

    train: Tokens
    validation: Tokens
    encoding: tiktoken.Encoding
    source: str
    is_stand_in: bool

    @property
    def bytes_per_token(self):
        """UTF-8 bytes of text for each token of the validation set that is a target."""
        counts = np.bincount(self.validation.ids, minlength=self.encoding.n_vocab)
        return float(counts @ vocabulary.byte_lengths(self.encoding) / (counts.sum() - 1))


def load(folder: str | os.PathLike | None = None):
    """TinyStories from `folder` (default: MESHBOOK_DATA), or the grammar's without one.

    Returns Stories. Text is tokenised the first time; the tokens are kept beside it, or in the
    user's cache. Raises FileNotFoundError and ValueError for what is missing or damaged.
    """
    folder = folder or os.environ.get("MESHBOOK_DATA")
    return load_tinystories(folder) if folder else load_grammar()


def load_grammar():
    """42,000 stories that the grammar writes, and 640 tokens learned from some: the stand-in."""
    told = lambda: grammar.stories(SEED, TRAIN + VALIDATION)  # all of them different
    encoding = vocabulary.learn(itertools.islice(told(), LEARNED_FROM), SIZE, name="grammar")
    where = cache(encoding, grammar.FACTS, grammar.STORY, SEED, TRAIN, VALIDATION)
    train = kept(where / "train.tokens", encoding, lambda: itertools.islice(told(), TRAIN))
    held = kept(where / "validation.tokens", encoding,
                lambda: itertools.islice(told(), TRAIN, None))
    return Stories(train, held, encoding, is_stand_in=True,
                   source="a grammar's stories, a stand-in for TinyStories")


def load_tinystories(folder: str | os.PathLike):
    """The stories of the text files in `folder`/tinystories, with GPT-2's vocabulary.

    Files with "valid" in their name are for validation, or else the last one; the others for
    training, less any story that is in a file for validation too.
    """
    encoding = vocabulary.gpt2(folder)
    training, validating = text_files(pathlib.Path(folder).expanduser() / "tinystories")
    where = cache(encoding, *map(stamp, training + validating), beside=training[0].parent)
    held = kept(where / "validation.tokens", encoding, lambda: stories_in(validating))
    train = kept(where / "train.tokens", encoding,
                 lambda: without(stories_in(training), stories_in(validating)))
    return Stories(train, held, encoding, source="TinyStories", is_stand_in=False)


def text_files(folder: pathlib.Path):
    """(training files, validation files) among the *.txt of a folder."""
    paths = sorted(folder.glob("*.txt"))
    if len(paths) < 2:
        raise FileNotFoundError(
            f"expected the text of TinyStories in {folder}, one file for training and one for "
            f"validation, found {len(paths)} *.txt; `make data` downloads them, without "
            f"MESHBOOK_DATA the grammar's stories are used")
    validating = [path for path in paths if "valid" in path.name] or paths[-1:]
    training = [path for path in paths if path not in validating]
    return training, validating


def stories_in(paths: Iterable[str | os.PathLike]):
    """Yield the stories of text files, END between them, without the space around each."""
    for path in paths:
        rest = ""
        for block in blocks(path):
            *whole, rest = (rest + block).split(END)
            yield from filter(None, map(str.strip, whole))
        yield from filter(None, [rest.strip()])


def blocks(path: str | os.PathLike):
    """Yield a text in pieces of a million characters; ValueError where it is not UTF-8."""
    try:
        with open(path, encoding="utf8") as file:
            while block := file.read(1 << 20):
                yield block
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None


def without(stories: Iterable[str], others: Iterable[str]):
    """Yield the stories that are not among the others, compared by their SHA-256."""
    fingerprint = lambda text: hashlib.sha256(text.encode()).digest()
    known = {fingerprint(text) for text in others}
    return (text for text in stories if fingerprint(text) not in known)


def kept(path: pathlib.Path, encoding: tiktoken.Encoding, documents: Callable):
    """The Tokens of a file; it is written first where it is not there, or not whole."""
    try:
        return read_tokens(path, encoding)
    except (FileNotFoundError, ValueError):
        write_tokens(documents(), encoding, path)
        return read_tokens(path, encoding)


def cache(encoding: tiktoken.Encoding, *recipe: Any, beside: pathlib.Path | None = None):
    """The folder for tokens made by this recipe: in `beside`, or else in the user's cache.

    The latter without `beside`, and where that is read-only.
    """
    import pooch

    made = repr((vocabulary.identity(encoding).sha256, *recipe)).encode()
    name = f"tokens-{hashlib.sha256(made).hexdigest()[:12]}"
    if beside and beside.stat().st_mode & 0o222 and os.access(beside, os.W_OK):
        return beside / name
    return pathlib.Path(pooch.os_cache("meshbook")) / name


def stamp(path: pathlib.Path):
    """What changes with a file: its name, its size, the time of its last change."""
    return path.name, path.stat().st_size, path.stat().st_mtime_ns


def main(folder: str | os.PathLike):
    """Download TinyStories and GPT-2's vocabulary into the folder, unless they are there."""
    wanted = [(pathlib.Path(folder).expanduser() / "tinystories" / name, size, sha256,
               [f"{home}/datasets/roneneldan/TinyStories/resolve/{REVISION}/{name}"
                for home in MIRRORS])
              for name, (size, sha256) in TINYSTORIES.items()]
    wanted += [(vocabulary.gpt2_path(folder, name), 1 << 20, sha256, [vocabulary.GPT2_HOME + name])
               for name, sha256 in vocabulary.GPT2_FILES.items()]
    for path, size, sha256, mirrors in wanted:
        fetch(path, size, sha256, mirrors)
    print(f"TinyStories is in {folder} now: set MESHBOOK_DATA={folder} to use it.")


def fetch(path: pathlib.Path, size: int, sha256: str, mirrors: Sequence[str]):
    """Download one file, unless an intact copy is there already."""
    from meshbook.data import downloads

    if path.is_file():
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return print(f"{path} is there already, verified.")
    print(f"{path.name} from {mirrors[0].split('/')[2]}:")
    downloads.fetch_file(mirrors, sha256, size, path)


if __name__ == "__main__":
    from meshbook.data import downloads

    downloads.command(main, "python -m meshbook.data.stories DIR  (downloads TinyStories into DIR)")
