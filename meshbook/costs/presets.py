"""Models by name: decoders of sizes that people know, and the models of this book.

The decoder's head is its table of tokens, as in Llama 3.2 1B; Llama 3.1 8B and 70B have a head of
their own besides.

Sources: Llama Team 2024, arXiv:2407.21783, table 3 (8B, 70B); meta-llama/llama-models,
models/sku_list.py (1B); Muennighoff et al. 2024, "OLMoE", arXiv:2409.02060.
"""
from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig

_LLAMA = DecoderConfig(128_256, tokens=8192, embed=4096, hidden=14_336, heads=32, groups=8,
                       layers=32, dtype=jnp.bfloat16)
MODELS = {
    "Llama-like, 8B": _LLAMA,
    "Llama-like, 1B": replace(_LLAMA, embed=2048, hidden=8192, layers=16),
    "Llama-like, 70B": replace(_LLAMA, embed=8192, hidden=28_672, heads=64, layers=80),
    "OLMoE-like, 7B in 64 experts": DecoderConfig(
        50_304, tokens=4096, embed=2048, hidden=1024, heads=16, layers=16, dtype=jnp.bfloat16,
        experts=ExpertSizes(64, 8, capacity=1.25, auxiliary=0.01)),
    "JAXformer, with 16 experts": DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jnp.bfloat16),
    "this book's decoder": DecoderConfig(),
    "this book's MiniGPT": MiniGPTConfig(),
    "this book's ViT": ViTConfig(),
}
