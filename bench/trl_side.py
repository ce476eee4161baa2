"""TRL's GRPOTrainer on the CPU, run by the Python of ``.venv-trl``: python trl_side.py SPEC.json. It knows only TRL.

It writes ``seconds.json`` (one number per rollout step, without the time that saving took) and, every
``save_every`` rollouts, the model as ``step_N/``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

SPEC = json.loads(Path(sys.argv[1]).read_text())

import torch  # noqa: E402

torch.set_num_threads(SPEC["threads"])

import datasets  # noqa: E402
import transformers  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


class ForcedLengths(transformers.LogitsProcessor):
    """Row i ends with EOS as its ``lengths[i]``-th token, and not before."""

    def __init__(self, lengths: list[int], prompt: int, eos: int) -> None:
        self.lengths, self.prompt, self.eos = torch.tensor(lengths), prompt, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids.shape[1] - self.prompt == self.lengths - 1
        scores[~last, self.eos] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self.eos] = 0.0
        return scores


def force_lengths(model: Any, lengths: list[list[int]], eos: int) -> None:
    """Every call of ``generate`` takes the next list of lengths."""
    plain, calls = model.generate, iter(lengths)

    def generate(**arguments: Any) -> Any:
        forced = ForcedLengths(next(calls), arguments["input_ids"].shape[1], eos)
        return plain(**arguments, logits_processor=transformers.LogitsProcessorList([forced]))

    model.generate = generate


class Watch(transformers.TrainerCallback):
    """Seconds per rollout step; models on the way."""

    def __init__(self, tokenizer: Any) -> None:
        self.seconds: list[float] = []
        self.updates = 0
        self.tokenizer = tokenizer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.updates += 1
        if self.updates % SPEC["updates"]:
            return
        self.seconds.append(time.perf_counter() - self.started)
        step = len(self.seconds)
        if SPEC["save_every"] and step % SPEC["save_every"] == 0:
            model.save_pretrained(Path(SPEC["out"]) / f"step_{step}")
            self.tokenizer.save_pretrained(Path(SPEC["out"]) / f"step_{step}")
        self.started = time.perf_counter()


def main() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(SPEC["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(SPEC["model"], dtype=torch.float32)
    if SPEC["lengths"]:
        force_lengths(model, SPEC["lengths"], tokenizer.eos_token_id)
    samples = SPEC["prompts_per_step"] * SPEC["group_size"]
    per_update = samples // SPEC["updates"]
    config = GRPOConfig(
        output_dir=str(Path(SPEC["out"]) / "trl"),
        seed=SPEC["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=SPEC["micro_batch"],
        gradient_accumulation_steps=per_update // SPEC["micro_batch"],
        steps_per_generation=samples // SPEC["micro_batch"],
        num_generations=SPEC["group_size"],
        num_iterations=1,
        max_steps=SPEC["steps"] * SPEC["updates"],
        max_completion_length=SPEC["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over all tokens of an update
        learning_rate=SPEC["lr"],
        warmup_steps=SPEC["warmup"],
        lr_scheduler_type="linear",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch(tokenizer)
    rows = [json.loads(line) for line in Path(SPEC["rows"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=[letters if SPEC["lengths"] else exact],
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[watch],
    )
    trainer.train()
    (Path(SPEC["out"]) / "seconds.json").write_text(json.dumps(watch.seconds))


if __name__ == "__main__":
    main()
