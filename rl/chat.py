"""Text and messages to token ids, and token ids back to the text that graders see.

There is one way in, ``render``: what it returns is what is filtered, stored, sent to the engine and trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Messages = Sequence[Mapping[str, Any]]

PIECE = 1 << 16  # characters tokenised at a time when a text is far too long


class MessagesRefused(ValueError):
    """These messages, not all messages: a template may want roles to alternate, or know no tools."""


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder, or of a Hugging Face id (from the local cache when offline).

    ValueError when there is none; nothing is guessed from other files.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.path {path}: its tokenizer cannot be loaded: {error}") from error


def render(
    tokenizer: Any,
    prompt: str | Messages,
    apply_chat_template: bool | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[int]]:
    """The text of a prompt and its token ids, with exactly one BOS where the tokenizer uses one.

    Messages are rendered by the tokenizer's chat template with the generation prompt added; the template writes the
    BOS itself, so the ids equal ``apply_chat_template(tokenize=True)`` and the tokenizer's own BOS is not added. A
    plain text gets what the tokenizer puts before a text (its BOS), never what it puts behind (an EOS would end it).
    ``apply_chat_template``: None renders exactly the messages, True makes one user message of a plain text.

    ValueError for messages without a template, with ``apply_chat_template`` False, or that the template refuses.
    """
    text, templated = render_text(tokenizer, prompt, apply_chat_template, tools)
    return text, encode(tokenizer, text, templated)


def render_text(
    tokenizer: Any,
    prompt: str | Messages,
    apply_chat_template: bool | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, bool]:
    """The first half of ``render``: the text, and whether the template wrote it."""
    if isinstance(prompt, str) and not apply_chat_template:
        return prompt, False
    check_template(tokenizer, is_text=isinstance(prompt, str), apply_chat_template=apply_chat_template)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise MessagesRefused(f"the chat template refuses these messages: {error}") from error
    return text, True


def check_template(tokenizer: Any, is_text: bool, apply_chat_template: bool | None) -> None:
    """ValueError when a prompt needs a chat template and there is none, or must not use it."""
    if not is_text and apply_chat_template is False:
        raise ValueError("the prompt is a list of messages, but data.apply_chat_template is false; leave it null")
    if (not is_text or apply_chat_template) and tokenizer.chat_template is None:
        what = "data.apply_chat_template is true" if is_text else "the prompt is a list of messages"
        raise ValueError(f"{what}, but the model's tokenizer has no chat template; use plain text prompts")


def encode(tokenizer: Any, text: str, templated: bool) -> list[int]:
    """The second half of ``render``: token ids of a rendered text."""
    ids = _bare(tokenizer, text)
    if templated:
        return ids
    prefix = _prefix(tokenizer)
    if prefix and ids[: len(prefix)] == prefix:
        return ids  # the text spells its BOS already
    return prefix + ids


def encode_far_too_long(tokenizer: Any, text: str, keep: int) -> tuple[int, list[int]] | None:
    """For a huge text: how many tokens it has, and its last ``keep`` ids, in memory that does not grow with the text.

    The count is made piece by piece, so it may be off by a few tokens per piece. None when that leaves open whether
    the text has more than ``keep`` tokens, or when the text is not long enough for it: then ``encode`` it whole.
    """
    window = max(PIECE, 64 * keep)
    if len(text) <= 2 * window:
        return None
    pieces = range(0, len(text) - window, PIECE)
    count = sum(len(_bare(tokenizer, text[start : min(start + PIECE, len(text) - window)])) for start in pieces)
    tail = _bare(tokenizer, text[-window:])
    if len(tail) <= keep + 16 or count <= keep + 16 * len(pieces):
        return None
    return count + len(tail), tail[-keep:]


def _bare(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text of its own accord: its BOS, or nothing."""
    full = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
    bare = _bare(tokenizer, "a")
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    raise ValueError(f"the tokenizer spells 'a' as {bare}, but as {full} with special tokens: cannot tell its BOS")


def stop_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's EOS, and those of generation_config.json and config.json.

    Instruct models often end a turn with a token that is not the tokenizer's EOS; it stands in those files only.
    """
    found: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        config = _json_file(path, name)
        inner = config.get("text_config")
        for section in (config, inner if isinstance(inner, dict) else {}):
            value = section.get("eos_token_id")
            found += [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    return tuple(dict.fromkeys(int(each) for each in found))


def _json_file(path: str, name: str) -> dict[str, Any]:
    if Path(path).is_dir():
        file = Path(path) / name
    else:
        from transformers.utils import cached_file

        cached = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        file = Path(cached) if cached else Path(path) / name
    if not file.is_file():
        return {}
    loaded = json.loads(file.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def decode(tokenizer: Any, ids: Sequence[int], keep_special_tokens: bool, stop_ids: Sequence[int]) -> str:
    """The text of a completion as graders see it: without the token that stopped it, whatever else is kept.

    Special tokens are left out unless ``keep_special_tokens``; a tag registered as one (``<think>``) is then visible.
    """
    kept = [int(each) for each in ids]
    if kept and kept[-1] in stop_ids:
        kept.pop()
    return tokenizer.decode(kept, skip_special_tokens=not keep_special_tokens, clean_up_tokenization_spaces=False)
