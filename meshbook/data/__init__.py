"""What the models are trained on: images, stories, their vocabularies, and batches of them."""

__all__ = ["augmentation", "downloads", "grammar", "images", "order", "stories", "token_files",
           "tokens", "vocabulary"]
