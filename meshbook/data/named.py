"""The data of a run by its name: what is embedded, what was downloaded, or a folder."""
import os

from meshbook.data import images, stories


def load_named(name: str, text: bool):
    """Splits of images, or Stories: "digits", "cifar10"; "grammar", "tinystories"; or a folder.

    Downloads lie in MESHBOOK_DATA, or in data/. Raises ValueError for images where text was wanted,
    and the other way round; FileNotFoundError as the loaders do.
    """
    home = os.environ.get("MESHBOOK_DATA", "data")
    texts = {"grammar": stories.load_grammar, "tinystories": lambda: stories.load_tinystories(home)}
    pictures = {"digits": images.load_digits, "cifar10": lambda: images.load_cifar10(home)}
    named, others = (texts, pictures) if text else (pictures, texts)
    if name in others:
        raise ValueError(f"--data {name} is not for this model: expected a folder, or one of "
                         f"{', '.join(named)}")
    of_folder = stories.load_tinystories if text else images.load_cifar10
    return named.get(name, lambda: of_folder(name))()
