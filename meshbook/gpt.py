"""MiniGPT, the book's language model, and how it writes."""

from meshbook.minigpt import MiniGPT, MiniGPTConfig
from meshbook.writing import as_text, generate, stream

__all__ = ["MiniGPT", "MiniGPTConfig", "as_text", "generate", "stream"]
