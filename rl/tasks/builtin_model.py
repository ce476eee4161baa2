"""The built-in models: tiny Llamas for the sort task, made on the spot without any download.

A model folder is made once per user and recipe, in a process of its own (the caller needs no torch), and is a plain
Hugging Face folder: a character tokenizer, a config and safetensors. It is warm-started on imperfect demonstrations,
right with probability 1/4 and otherwise copied or sorted the wrong way round, so that reinforcement learning starts
from an accuracy near 0.2 and has something to find.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import torch

PREFIX = "builtin:"
CHARACTERS = "0123456789 =+-*/().,:?abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
PAD, EOS = "<pad>", "<eos>"
POSITIONS = 128
TIMEOUT = 900.0  # seconds in which a model must be made


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a built-in model depends on; its hash is part of the folder's name."""

    min_digits: int
    max_digits: int
    width: int
    layers: int
    heads: int
    steps: int
    lr: float
    batch: int = 64
    warmup: int = 20
    right: float = 0.3  # part of the demonstrations that are right
    seed: int = 0
    initializer_range: float = 0.08  # 0.02 is too small at these widths
    version: int = 1


RECIPES = {
    "tiny": Recipe(min_digits=4, max_digits=6, width=64, layers=2, heads=2, steps=500, lr=4e-3),
    "small": Recipe(min_digits=6, max_digits=8, width=96, layers=3, heads=3, steps=600, lr=3e-3),
}


def resolve_model(path: str, threads: int = 1, progress: Callable[[str], None] | None = None) -> str:
    """The folder or id to load for ``model.path``: a built-in model is made if need be, a folder is checked.

    ``threads`` are for the process that makes a model; the result does not depend on them. ``progress`` gets one line
    when that takes a while. ValueError for an unknown name or a folder without a config.json; RuntimeError when the
    making fails, with its last words.
    """
    if path.startswith(PREFIX):
        return str(_built(path.removeprefix(PREFIX), threads, progress))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            names = sorted(entry.name for entry in folder.iterdir())
            listing = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"
            raise ValueError(f"model.path {path}: the folder holds no config.json (it holds {listing})")
        return str(folder.resolve())
    if folder.exists():
        raise ValueError(f"model.path {path}: is a file; a model is a folder with a config.json, or an id")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"model.path {path}: no such folder")
    return path


def model_max_len(path: str) -> int:
    """Positions the model was made for, from its config.json (no torch); an id is looked up in the local cache first.

    ValueError when the config says none.
    """
    config = _config(path)
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
            value = section.get(key)
            if isinstance(value, int) and value > 0:
                return value
    raise ValueError(f"model.path {path}: config.json names no max_position_embeddings; set rollout.max_model_len")


def _config(path: str) -> dict[str, Any]:
    if path.startswith(PREFIX):
        return {"max_position_embeddings": POSITIONS}
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        from transformers.utils import cached_file

        found = cached_file(path, "config.json")
        assert found is not None
        file = Path(found)
    loaded = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError(f"{file}: is not a JSON object")
    return loaded


def cache_folder() -> Path:
    """Where built-in models are kept: $XDG_CACHE_HOME/parkrl, else ~/.cache/parkrl."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "parkrl"


def model_folder(name: str) -> Path:
    """The folder of a built-in model, made or not."""
    if name not in RECIPES:
        raise ValueError(f"model.path {PREFIX}{name}: unknown; the built-in models are {_known()}")
    spec = json.dumps(asdict(RECIPES[name]), sort_keys=True) + CHARACTERS + str(POSITIONS)
    return cache_folder() / f"{name}-{xxhash.xxh3_64_hexdigest(spec.encode('utf-8'))}"


def _known() -> str:
    return ", ".join(PREFIX + name for name in RECIPES)


def _built(name: str, threads: int, progress: Callable[[str], None] | None) -> Path:
    """Makes the folder in a subprocess beside its place and renames it; whoever is first wins, both get a whole one."""
    target = model_folder(name)
    if (target / "config.json").is_file():
        return target
    if progress is not None:
        progress(f"making {PREFIX}{name} once (warm start of {RECIPES[name].steps} steps) in {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        root = str(Path(__file__).resolve().parents[2])  # also where the package is not installed
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "rl.tasks.builtin_model", name, str(scratch / "model")]
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=TIMEOUT, encoding="utf-8", errors="replace"
        )
        if done.returncode != 0:
            raise RuntimeError(f"making {PREFIX}{name} failed ({done.returncode}):\n{done.stderr[-2000:]}")
        try:
            os.rename(scratch / "model", target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was first, with the same result
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def make(name: str, out: Path) -> None:
    """Trains and writes the model ``name`` into ``out``; deterministic (fixed seeds, one thread)."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(RECIPES[name].seed)
    recipe = RECIPES[name]
    tokenizer = _tokenizer()
    model = _fresh(recipe, tokenizer)
    _warm_start(model, tokenizer, recipe)
    out.mkdir(parents=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)  # config.json comes with the weights


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate((PAD, EOS, "<unk>", *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def _fresh(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=3 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=recipe.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def demonstration(digits: str, right: float, rng: random.Random) -> str:
    """What a demonstration answers: sorted with probability ``right``, else copied or sorted downwards."""
    if rng.random() < right:
        return "".join(sorted(digits))
    return digits if rng.random() < 0.5 else "".join(sorted(digits, reverse=True))


def _warm_start(model: Any, tokenizer: Any, recipe: Recipe) -> None:
    """Supervised steps on the answers' tokens; AdamW, linear warm-up, linear decay to 0."""
    import torch

    from rl.tasks.sort import Sort

    rng = random.Random(recipe.seed)
    task = Sort(min_digits=recipe.min_digits, max_digits=recipe.max_digits)
    rows = task.rows("warm", recipe.steps * recipe.batch, recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    model.train()
    for step in range(recipe.steps):
        pairs = []
        for _ in range(recipe.batch):
            row = next(rows)
            pairs.append((row["prompt"], demonstration(row["digits"], recipe.right, rng)))
        ids, labels = _batch(pairs, tokenizer)
        scale = min(1.0, (step + 1) / recipe.warmup) * (1 - step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * scale
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _batch(pairs: list[tuple[str, str]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and labels, -100 on prompt and padding; causal attention needs no mask for it."""
    import torch

    number = tokenizer.get_vocab()  # one character, one token: looked up by hand, which is ten times as fast
    rows, marks = [], []
    for prompt, answer in pairs:
        head = [number[each] for each in prompt]
        tail = [*(number[each] for each in answer), tokenizer.eos_token_id]
        rows.append(head + tail)
        marks.append([-100] * len(head) + tail)
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    return ids, torch.tensor([mark + [-100] * (width - len(mark)) for mark in marks])


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
