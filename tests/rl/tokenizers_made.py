"""Small tokenizers made on the spot, one token per character or word, with the traits that go wrong in the field."""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}t{{ tool.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def characters(adds_bos: bool, template: bool = True) -> Any:
    """One token per character; BOS is 0 and EOS is 1; with ``adds_bos`` the tokenizer puts BOS in front by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    signs = ["<s>", "</s>", "<unk>", "<think>", *(chr(code) for code in range(32, 127)), "é", "日"]
    vocabulary = {sign: number for number, sign in enumerate(signs)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<s>", "</s>", "<think>"])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE if template else None
    return made
