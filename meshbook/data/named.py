"""The data of a run by its name: what is embedded, what was downloaded, or a folder."""
import os
import pathlib

from meshbook.data import images, shards, stories
from meshbook.data.corpus import INDEX


def load_named(name: str, text: bool):
    """Splits of images, or Stories: "digits", "cifar10"; "grammar", "tinystories"; or a folder.

    A folder or URL with an index.json is a Corpus. Downloads lie in MESHBOOK_DATA, or in data/.
    Raises ValueError for images where text was wanted, and the other way round; FileNotFoundError
    as the loaders do.
    """
    home = os.environ.get("MESHBOOK_DATA", "data")
    texts = {"grammar": stories.load_grammar, "tinystories": lambda: stories.load_tinystories(home)}
    pictures = {"digits": images.load_digits, "cifar10": lambda: images.load_cifar10(home)}
    named, others = (texts, pictures) if text else (pictures, texts)
    if name in others:
        raise ValueError(f"--data {name} is not for this model: expected a folder, or one of "
                         f"{', '.join(named)}")
    if text and ("://" in name or pathlib.Path(name, INDEX).exists()):
        return shards.read_corpus(name)
    of_folder = stories.load_tinystories if text else images.load_cifar10
    return named.get(name, lambda: of_folder(name))()
