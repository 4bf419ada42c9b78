"""The models of the book, and how language models write; layers and losses are modules beside."""

from meshbook.models.generation import as_text, generate, stream
from meshbook.models.minigpt import MiniGPT, MiniGPTConfig
from meshbook.models.vit import ViT, ViTConfig

__all__ = ["MiniGPT", "MiniGPTConfig", "ViT", "ViTConfig", "as_text", "generate", "stream"]
