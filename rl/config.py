"""The run's settings: typed, strict, and light (no torch, ray or vllm is imported here).

Every setting has one owner, a unit, a range and a meaning in its description. An unknown key is an error, and so is a
setting that would be ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Settings that belong together. Strict: 1 is a float, but "1", true, null, NaN and infinity are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class Run(Section):
    name: str = Field("run", min_length=1, description="Shown in titles and logs.")
    seed: NonNegative = Field(0, description="Everything random derives from it: order, sampling, initialisation.")
    output_dir: str = Field("runs/run", min_length=1, description="The run folder; it must not hold another run.")


class Cluster(Section):
    address: str | None = Field(None, description="A running Ray to join; else RAY_ADDRESS; else one is started here.")


class Model(Section):
    path: str = Field(
        "builtin:tiny", min_length=1, description="A Hugging Face folder or id, or builtin:tiny / builtin:small."
    )
    trust_remote_code: bool = Field(False, description="Run the code that comes with the model.")


class Data(Section):
    train: str = Field(
        "builtin:sort",
        min_length=1,
        description="JSONL, JSON, CSV, Parquet; Hugging Face dataset folder or id; reasoning_gym:NAME; builtin:NAME.",
    )
    eval: str | None = Field(None, description="Held-out rows, in the same forms; none: no evaluation.")
    train_split: str = Field("train", description="Split of a Hugging Face dataset.")
    eval_split: str = Field("test", description="Split of a Hugging Face dataset.")
    prompt_column: str = Field("prompt", min_length=1, description="Text, or a list of {role, content} messages.")
    answer_column: str | None = Field("answer", description="The reference answer; null when rows have none.")
    apply_chat_template: bool | None = Field(
        None, description="Render prompts with the tokenizer's chat template; null: exactly when they are messages."
    )
    max_prompt_tokens: Positive | None = Field(
        None, description="Tokens; null: rollout.max_model_len - rollout.max_new_tokens."
    )
    overlong: Literal["error", "drop", "left"] = Field(
        "error", description="A prompt over the limit: stop, drop and count it, or keep its last max_prompt_tokens."
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error", description="A row that cannot be used: stop, or drop and count."
    )
    shuffle: bool = Field(True, description="A new seeded order in each epoch; false: the order of the file.")
    rows: Positive = Field(4096, description="Rows to generate for builtin:NAME and reasoning_gym:NAME.")
    eval_rows: Positive = Field(512, description="Rows to generate for a generated eval set.")
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of a reasoning_gym or built-in task."
    )


class Reward(Section):
    """One component: exactly one of ``name`` (built in) and ``function`` (the user's own)."""

    name: Literal["exact_match", "math", "format", "length", "task"] | None = Field(None, description="A built-in one.")
    function: str | None = Field(None, description="path/to/file.py:function or module:function.")
    weight: float = Field(1.0, description="The combined reward is the sum of weight x component.")
    pattern: str | None = Field(None, description="format: the regular expression the whole answer must match.")
    overlong_buffer: Positive | None = Field(
        None,
        description="length: tokens before max_new_tokens in which the penalty grows linearly to -1 (DAPO, eq. 13).",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Reward:
        if (self.name is None) == (self.function is None):
            raise ValueError(
                f"give exactly one of name and function (seen: name={self.name}, function={self.function})"
            )
        if (self.pattern is not None) != (self.name == "format"):
            raise ValueError("pattern goes with name: format, and format needs a pattern")
        if (self.overlong_buffer is not None) != (self.name == "length"):
            raise ValueError("overlong_buffer goes with name: length, and length needs an overlong_buffer")
        return self


class Grading(Section):
    workers: Positive = Field(2, description="Grader processes per node.")
    timeout: float = Field(10.0, gt=0, description="Seconds per sample, after which its grader process is killed.")
    memory_mb: Positive = Field(2048, description="Memory of one grader process; over it, the sample is an error.")
    max_error_rate: Fraction = Field(
        0.1, description="Stop when more than this part of a step's samples are errors or timeouts."
    )
    keep_special_tokens: bool = Field(False, description="Show graders special tokens too (never the final EOS).")


class KL(Section):
    coef: float = Field(0.0, description="Weight of the KL to the reference policy; only 0 in this version.")


class Algorithm(Section):
    name: Literal["grpo"] = Field("grpo", description="The recipe.")
    group_size: Annotated[int, Field(ge=2)] = Field(8, description="Samples per prompt (G).")
    clip_low: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="The ratio is clipped above at 1 + clip_high.")
    advantage_epsilon: float = Field(1e-4, ge=0, description="Added to the group's standard deviation.")
    old_logprobs: Literal["rollout", "learner"] = Field(
        "rollout",
        description="Denominator of the ratio: the sampler's log-probabilities, or recomputed by the learner.",
    )
    kl: KL = Field(default_factory=KL)


class Rollout(Section):
    replicas: Positive = Field(1, description="vLLM engines.")
    prompts_per_step: Positive = Field(32, description="Prompts in one step; each is sampled group_size times.")
    max_new_tokens: Positive = Field(256, description="Tokens per completion, at most.")
    max_model_len: Positive | None = Field(
        None, description="Tokens of prompt + completion; null: the model's own, at most 4096."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature in training.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="The engine's weights and arithmetic."
    )
    tensor_parallel_size: Positive = Field(1, description="Workers of one engine.")
    threads: Positive = Field(1, description="CPU threads of one engine's worker.")
    kv_cache_mb: Positive = Field(256, description="MiB of key/value cache of one engine's worker (CPU).")
    max_num_seqs: Positive = Field(256, description="Requests that one engine runs at a time.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Any further vLLM engine argument.")
    start_timeout: float = Field(600.0, gt=0, description="Seconds within which an engine must be up.")
    step_timeout: float = Field(1800.0, gt=0, description="Seconds without any finished completion before giving up.")


class Learner(Section):
    device: Literal["cpu", "cuda"] = Field("cpu", description="What the learner trains on.")
    workers: Positive = Field(1, description="Ray Train workers (ranks).")
    threads: Positive = Field(1, description="CPU threads per rank.")
    updates_per_batch: Positive = Field(
        1, description="Optimizer updates per step, each on an equal share of the groups."
    )
    lr: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="After warm-up.")
    lr_final_ratio: Fraction = Field(0.1, description="Learning rate at the end as a part of the peak.")
    warmup_steps: NonNegative = Field(0, description="Optimizer updates of linear warm-up.")
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field((0.9, 0.99), description="AdamW.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, on matrices only.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to it.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16: autocast over float32 master weights."
    )
    max_tokens_per_micro_batch: Positive = Field(4096, description="Padded positions in one micro-batch, at most.")
    max_restarts: NonNegative = Field(2, description="Times that a dead worker group is started again.")
    start_timeout: float = Field(600.0, gt=0, description="Seconds within which all ranks must be up.")
    step_timeout: float = Field(3600.0, gt=0, description="Seconds that one step's training may take.")


class Sync(Section):
    bucket_mb: Positive = Field(256, description="MiB per bucket.")
    probe_tokens: Annotated[int, Field(ge=8)] = Field(64, description="Length of the probe text.")
    tolerance: float | None = Field(
        None, gt=0, description="Largest probe difference; null: 1e-3 in float32, 0.25 in 16 bits."
    )


class Train(Section):
    steps: Positive | None = Field(None, description="Steps; give steps or epochs.")
    epochs: Positive | None = Field(
        None, description="Passes over the data: floor(epochs x rows / prompts_per_step) steps."
    )
    max_staleness: NonNegative = Field(0, description="Versions a token may lag; only 0 (synchronous) in this version.")
    eval_every: NonNegative = Field(0, description="Steps between evaluations; 0: only at start and end.")
    checkpoint_every: NonNegative = Field(0, description="Steps between checkpoints; 0: only at the end.")
    keep_checkpoints: Positive = Field(2, description="Newest checkpoints kept.")


class Eval(Section):
    prompts: Positive | None = Field(None, description="Held-out prompts used; null: all.")
    samples: NonNegative = Field(0, description="Samples per prompt for sampled accuracy and pass@k; 0: greedy only.")
    temperature: float = Field(1.0, gt=0, description="Of those samples.")


class Settings(Section):
    """A run. Read one with ``rl.settings_file.load``; every section but ``train`` may be left out."""

    run: Run = Field(default_factory=Run)
    cluster: Cluster = Field(default_factory=Cluster)
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    rewards: Annotated[tuple[Reward, ...], Field(strict=False)] = Field(
        (), description="None: the task's own, or exact_match for files with answers."
    )
    grading: Grading = Field(default_factory=Grading)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    rollout: Rollout = Field(default_factory=Rollout)
    learner: Learner = Field(default_factory=Learner)
    sync: Sync = Field(default_factory=Sync)
    placement: dict[str, Any] = Field(default_factory=dict, description="Group -> slice; empty in this version.")
    train: Train
    eval: Eval = Field(default_factory=Eval)
