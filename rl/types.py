"""Every record that crosses a boundary.

Shapes: P tokens of a prompt, C of a completion, L = P + C of one sequence, [B, T] rows and positions of a micro-batch.

Four log-probabilities have four names: ``rollout_logprobs`` (the sampler's, at sampling temperature), ``old_logprobs``
(the learner's before the update), ``logprobs`` (current) and ``ref_logprobs``. Token ids that came from the engine are
the ids that are trained on: nothing is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Outcome = Literal["ok", "wrong", "error", "timeout", "invalid"]
"""What became of a sample when it was graded.

``ok`` and ``wrong`` were scored. The others were not, and their reward is None: ``error`` (the grader raised or gave no
finite number), ``timeout`` (it was killed), ``invalid`` (the row's reference answer cannot be parsed).
"""
OUTCOMES: tuple[Outcome, ...] = ("ok", "wrong", "error", "timeout", "invalid")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of data, ready to be sent: ``token_ids`` [P] were filtered, are sent and are trained on."""

    prompt_id: str  # position in the source, the same in every run: "0", "1", ...
    row: str  # file and line for messages: "train.jsonl:17"
    token_ids: IntArray
    text: str  # what the ids spell: the plain prompt, or the chat template's rendering
    answer: Any = None
    messages: Sequence[Mapping[str, Any]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # every other column, for reward functions


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples; every value is explicit, so no model folder's generation_config.json has a say."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One completion wanted. Those of a step are handed over in a fixed order; ``seed`` is each one's own."""

    request_id: str
    token_ids: IntArray  # [P]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request produced, exactly as the engine gave it.

    A stop token is part of ``token_ids`` (finish_reason "stop"); after "length" nothing is added. ``rollout_logprobs``
    are of the sampled tokens, after temperature, natural logarithm. ``version_spans`` says run-length which
    policy_version sampled which tokens: ((3, 5), (4, 2)) is five tokens of version 3, then two of version 4.
    """

    token_ids: IntArray  # [C]
    rollout_logprobs: FloatArray  # [C]
    finish_reason: Literal["stop", "length"]
    version_spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A grader's verdict. ``reward`` is None exactly when the outcome is error, timeout or invalid."""

    reward: float | None
    outcome: Outcome
    parts: Mapping[str, float | None] = field(default_factory=dict)  # every component before weighting
    detail: str = ""  # for error and timeout: what was raised, where

    def __post_init__(self) -> None:
        scored = self.outcome in ("ok", "wrong")
        assert scored == (self.reward is not None), (self.outcome, self.reward)
        assert self.reward is None or np.isfinite(self.reward), self.reward


@dataclass(frozen=True, slots=True)
class GradeJob:
    """One group on its way to the graders: the completions' decoded texts, in the order of the group."""

    group_id: str
    prompt: Prompt
    texts: tuple[str, ...]
    token_counts: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    group_id: str
    index: int  # 0 .. G-1 within the group
    completion: Completion
    text: str
    score: Score


@dataclass(frozen=True, slots=True)
class Group:
    """G trajectories of one prompt. Groups are kept by id, never by position in an array."""

    group_id: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to learn from: loss_mask is True exactly on the tokens that were sampled."""

    group_id: str
    token_ids: IntArray  # [L]
    loss_mask: BoolArray  # [L]
    rollout_logprobs: FloatArray  # [L], 0 where loss_mask is False
    advantages: FloatArray  # [L], 0 where loss_mask is False
    version_spans: tuple[tuple[int, int], ...]
    has_signal: bool = True  # False: every advantage is 0, so it adds nothing to the gradient but its tokens count


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. Shifted once, when packed: index t always speaks of ``targets[:, t]``, the token after input t.

    Padding has segment_ids -1, loss_mask False and finite zeros elsewhere. ``loss_denominator`` is global (over ranks
    and micro-batches) and the same in every micro-batch of one optimizer update.
    """

    input_ids: IntArray  # [B, T]
    targets: IntArray  # [B, T]
    position_ids: IntArray  # [B, T]
    segment_ids: IntArray  # [B, T]
    loss_mask: BoolArray  # [B, T]
    rollout_logprobs: FloatArray  # [B, T]
    advantages: FloatArray  # [B, T]
    policy_versions: IntArray  # [B, T]; which version sampled targets[:, t], -1 elsewhere
    loss_denominator: float


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one learner rank trains on in one controller step: micro-batches per optimizer update.

    A rank may have no micro-batch in an update (its samples carried no signal); it still takes part in the reduction.
    ``apply[u]`` is False where update u has no scored token on any rank: then no optimizer step is made.
    """

    step: int
    updates: tuple[tuple[Batch, ...], ...]
    apply: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Where one named parameter lies: ``shape`` of ``dtype`` at byte ``offset`` of bucket number ``bucket``."""

    name: str
    dtype: str  # "float32", "bfloat16", "float16"
    shape: tuple[int, ...]
    bucket: int
    offset: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Log-probabilities of a fixed text under the learner's weights: ``logprobs[t]`` is of token t + 1 given 0..t."""

    token_ids: IntArray  # [N]
    logprobs: FloatArray  # [N - 1]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One published version of the weights: flat byte buckets (Ray object references), what lies in them, the proof."""

    version: int
    buckets: tuple[Any, ...]  # references to flat uint8 arrays
    checksums: tuple[str, ...]  # xxh3_64 of each bucket, hexadecimal
    tensors: tuple[TensorMeta, ...]
    probe: Probe
    nbytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # flatten, checksum, put


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One engine's account of a weight update. ``verified`` only if checksums and probe both hold."""

    engine: str
    version: int
    checksums_match: bool
    probe_max_abs: float  # largest |engine - learner| log-probability of the probe; NaN when it could not be measured
    tolerance: float
    seconds: Mapping[str, float] = field(default_factory=dict)  # get, checksum, load, probe

    @property
    def verified(self) -> bool:
        return self.checksums_match and self.probe_max_abs <= self.tolerance


@dataclass(frozen=True, slots=True)
class StepResult:
    """One turn of the loop. ``metrics`` are plain floats under the names of ``rl/metrics.py``."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]
