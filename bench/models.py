"""Random models of a given size, saved with a tokenizer, and settings that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.config import Settings
from rl.settings_file import from_mapping
from rl.tasks.builtin_model import resolve_model


def save_llama(folder: Path, *, vocab: int, width: int, layers: int, heads: int, positions: int = 1024) -> int:
    """A random float32 Llama with tied embeddings; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def tiny() -> str:
    return resolve_model("builtin:tiny")


def settings(model: str, **sections: Any) -> Settings:
    base: dict[str, Any] = {"model": {"path": model}, "train": {"steps": 1}}
    return from_mapping(base | sections)


def save_words(folder: Path, vocab: int) -> None:
    """A tokenizer of ``vocab`` words w0, w1, ... for a random model; 0 pads, 1 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(vocab - 3))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
