"""What the models are trained on: images, stories, their vocabularies, and batches of them."""

__all__ = ["augmentation", "buckets", "corpus", "corpus_plan", "corpus_ray", "corpus_workers",
           "documents", "downloads", "grammar", "images", "make_corpus", "named", "order",
           "shards", "stories", "token_files", "tokens", "vocabulary"]
