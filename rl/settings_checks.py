"""Rules between settings: what each value allows by itself may still not work together. Every message shows the sum."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from rl.settings_errors import nearest, show

if TYPE_CHECKING:
    from rl.config import Section, Settings

Finding = tuple[str, str, str]  # dotted key, what is wrong, the nearest right one ("" when there is none)

LONGEST_MODEL_LEN = 4096  # what rollout.max_model_len: null allows at most
BUILTIN_MODELS = ("builtin:tiny", "builtin:small")
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

# vLLM arguments that another setting (or the product itself) decides.
OWNED_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "kv_cache_memory_bytes": "rollout.kv_cache_mb",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "generation_config": "",
    "distributed_executor_backend": "",
    "skip_tokenizer_init": "",
    "weight_transfer_config": "",
    "load_format": "",
    "disable_log_stats": "",
    "enable_chunked_prefill": "",
}


def findings(settings: Settings) -> Iterator[Finding]:
    """Every broken rule between settings, in the order of the sections."""
    for rule in (_model, _data, _rewards, _batch, _lengths, _engine_args, _learner, _train, _eval, _later):
        yield from rule(settings)


def _differs(section: Section, name: str) -> bool:
    """Whether a setting was given something else than its default (a value equal to its default cannot be ignored)."""
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(section, name) != default)


def is_generated(source: str) -> bool:
    """Whether rows are made on the spot (``builtin:`` and ``reasoning_gym:``) and thus bring their own grader."""
    return source.startswith(("builtin:", "reasoning_gym:"))


def _model(settings: Settings) -> Iterator[Finding]:
    path = settings.model.path
    if path.startswith("builtin:") and path not in BUILTIN_MODELS:
        near = nearest(path, BUILTIN_MODELS)
        yield (
            f"model.path = {show(path)}",
            f"the built-in models are {' and '.join(BUILTIN_MODELS)}",
            f"did you mean {near}?" if near else "",
        )


def _data(settings: Settings) -> Iterator[Finding]:
    data = settings.data
    for which, source, rows, split in (
        ("train", data.train, "rows", "train_split"),
        ("eval", data.eval, "eval_rows", "eval_split"),
    ):
        if source == "":
            yield f"data.{which} = ''", "must not be empty", "null means no evaluation" if which == "eval" else ""
        generated = source is not None and is_generated(source)
        if _differs(data, rows) and not generated:
            rule = f"would be ignored: it counts rows to generate, but data.{which} is {show(source)}"
            yield f"data.{rows} = {getattr(data, rows)}", rule, "leave it out"
        plain_file = source is None or generated or FilePath(source).suffix.lower() in FILE_SUFFIXES
        if _differs(data, split) and plain_file:
            rule = f"would be ignored: data.{which} = {show(source)} is no Hugging Face dataset"
            yield f"data.{split} = {show(getattr(data, split))}", rule, "leave it out"
    if data.task_options and not any(source is not None and is_generated(source) for source in (data.train, data.eval)):
        rule = "would be ignored: only builtin:NAME and reasoning_gym:NAME have options"
        yield f"data.task_options = {show(data.task_options)}", rule, "leave it out"


def _rewards(settings: Settings) -> Iterator[Finding]:
    data, no_answers = settings.data, settings.data.answer_column is None
    generated = is_generated(data.train)
    if not settings.rewards and no_answers and not generated:
        rule = "the default reward, exact_match, compares with an answer, but data.answer_column is null"
        yield "rewards", rule, "name the column of answers, or give a reward that needs none"
    if settings.rewards and all(reward.weight == 0 for reward in settings.rewards):
        weights = " + ".join(str(reward.weight) for reward in settings.rewards)
        yield "rewards", f"every weight is 0 ({weights}): there is nothing to learn", "give one a weight"
    for index, reward in enumerate(settings.rewards):
        key = f"rewards.{index}"
        if reward.name in ("exact_match", "math") and no_answers and not generated:
            rule = f"{reward.name} compares with an answer, but data.answer_column is null"
            yield f"{key}.name = '{reward.name}'", rule, "name the column of answers"
        if reward.name == "task" and not generated:
            rule = f"only builtin: and reasoning_gym: data have their own grader, but data.train is {show(data.train)}"
            yield f"{key}.name = 'task'", rule, "exact_match and math compare with an answer"
        if reward.pattern is not None:
            try:
                re.compile(reward.pattern)
            except re.error as error:
                yield f"{key}.pattern = {show(reward.pattern)}", f"not a regular expression: {error}", ""
        budget = settings.rollout.max_new_tokens
        if reward.overlong_buffer is not None and reward.overlong_buffer >= budget:
            rule = f"must be less than rollout.max_new_tokens = {budget}"
            near = f"the nearest allowed is {budget - 1}" if budget > 1 else ""
            yield f"{key}.overlong_buffer = {reward.overlong_buffer}", rule, near


def _batch(settings: Settings) -> Iterator[Finding]:
    prompts, size = settings.rollout.prompts_per_step, settings.algorithm.group_size
    updates, workers = settings.learner.updates_per_batch, settings.learner.workers
    samples = prompts * size
    total = f"{prompts} prompts x {size} samples = {samples} samples"
    key = f"learner.updates_per_batch = {updates}"
    if samples % updates:
        rule = (
            f"{total}, {samples} / {updates} updates = {samples / updates:.2f} samples per update, not a whole number"
        )
    elif prompts % updates:
        rule = (
            f"{total}; an update takes whole groups, and {prompts} groups / {updates} updates = "
            f"{prompts / updates:.2f} is not a whole number"
        )
    else:
        per_update = samples // updates
        if per_update < workers:
            share = f"{samples} / {updates} updates = {per_update} samples per update"
            rule = f"{total}, {share}, fewer than {workers} workers"
            near = f"at most {per_update} workers, or at least {updates * -(-workers // size)} prompts per step"
            yield f"learner.workers = {workers}", rule, near
        return
    divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
    best = min(divisors, key=lambda number: (abs(number - updates), number))
    yield key, rule, f"the nearest that works is {best}"


def _lengths(settings: Settings) -> Iterator[Finding]:
    new, limit, prompt = (
        settings.rollout.max_new_tokens,
        settings.rollout.max_model_len,
        settings.data.max_prompt_tokens,
    )
    top = LONGEST_MODEL_LEN if limit is None else limit
    name = (
        f"rollout.max_model_len = {top}"
        if limit is not None
        else f"{top}, the most that rollout.max_model_len: null allows"
    )
    if new >= top:
        rule = f"leaves no room for a prompt: it must be less than {name}"
        yield f"rollout.max_new_tokens = {new}", rule, f"the nearest allowed is {top - 1}" if top > 1 else ""
    elif prompt is not None and prompt + new > top:
        rule = f"{prompt} prompt tokens + {new} new tokens = {prompt + new}, more than {name}"
        yield f"data.max_prompt_tokens = {prompt}", rule, f"the nearest allowed is {top - new}"


def _engine_args(settings: Settings) -> Iterator[Finding]:
    for name in settings.rollout.engine_args:
        plain = name.lower().replace("-", "_")
        if plain in OWNED_ENGINE_ARGS:
            owner = OWNED_ENGINE_ARGS[plain]
            rule = f"is decided by {owner}" if owner else "is decided by the product and cannot be given"
            yield f"rollout.engine_args.{name}", rule, f"set {owner}" if owner else "leave it out"


def _learner(settings: Settings) -> Iterator[Finding]:
    learner = settings.learner
    for index, beta in enumerate(learner.betas):
        if not 0 <= beta < 1:
            yield f"learner.betas.{index} = {beta}", "must be at least 0 and less than 1", ""
    if learner.lr_schedule == "constant" and _differs(learner, "lr_final_ratio"):
        rule = "would be ignored: learner.lr_schedule is constant"
        yield f"learner.lr_final_ratio = {learner.lr_final_ratio}", rule, "leave it out, or choose linear or cosine"


def _train(settings: Settings) -> Iterator[Finding]:
    train = settings.train
    if train.steps is None and train.epochs is None:
        yield "train", "give steps or epochs (seen: neither)", "for example train: {steps: 80}"
    if train.steps is not None and train.epochs is not None:
        rule = f"give steps or epochs, not both (seen: steps = {train.steps}, epochs = {train.epochs})"
        yield "train", rule, "set the other one to null (--set train.steps=null)"


def _eval(settings: Settings) -> Iterator[Finding]:
    evaluation, data = settings.eval, settings.data
    if data.eval is None:
        if settings.train.eval_every:
            rule = "would be ignored: data.eval is null, so there is nothing to evaluate on"
            yield f"train.eval_every = {settings.train.eval_every}", rule, "name held-out rows in data.eval"
        for name in ("prompts", "samples", "temperature"):
            if _differs(evaluation, name):
                rule = "would be ignored: data.eval is null"
                yield f"eval.{name} = {getattr(evaluation, name)}", rule, "name held-out rows in data.eval"
        return
    if evaluation.samples == 0 and _differs(evaluation, "temperature"):
        rule = "would be ignored: it is the temperature of eval.samples, and eval.samples is 0"
        yield f"eval.temperature = {evaluation.temperature}", rule, "set eval.samples"
    if evaluation.prompts is not None and is_generated(data.eval) and evaluation.prompts > data.eval_rows:
        rule = f"more than data.eval_rows = {data.eval_rows}, the rows generated"
        yield f"eval.prompts = {evaluation.prompts}", rule, f"set data.eval_rows to {evaluation.prompts}"


def _later(settings: Settings) -> Iterator[Finding]:
    """What the settings can say but this version cannot do."""
    if settings.algorithm.kl.coef != 0:
        rule = "a KL to the reference policy is not in this version"
        yield f"algorithm.kl.coef = {settings.algorithm.kl.coef}", rule, "only 0 is allowed"
    if settings.train.max_staleness != 0:
        rule = "asynchronous training is not in this version"
        yield f"train.max_staleness = {settings.train.max_staleness}", rule, "only 0 is allowed"
    if settings.placement:
        rule = "placement on slices is not in this version"
        yield f"placement = {show(settings.placement)}", rule, "leave it empty"
