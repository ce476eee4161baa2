"""From per-token losses to one number, as weights: how much each token counts, and what all is divided by.

loss = (sum over all loss tokens of weight * loss) / (sum over all sequences of denominator), both over the whole
optimizer update. A sequence's weight and denominator depend on that sequence alone, so cutting the update into
micro-batches, packs and ranks changes nothing: each adds its part of the first sum and divides by the same second sum,
known before the first backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rl.types import BoolArray, FloatArray


class SequenceWeight(NamedTuple):
    token: float  # weight of each of the sequence's loss tokens
    denominator: float  # what the sequence adds to the global denominator


def token_mean(tokens: int, length: int) -> SequenceWeight:
    """Every token counts the same (DAPO, arXiv:2503.14476, eq. 12): long sequences weigh more than short ones.

    >>> token_mean(3, 0)
    SequenceWeight(token=1.0, denominator=3.0)
    """
    return SequenceWeight(1.0, float(tokens))


def sequence_mean(tokens: int, length: int) -> SequenceWeight:
    """Every sequence counts the same (GRPO, arXiv:2402.03300, eq. 3): a token of a long one weighs less.

    >>> sequence_mean(4, 0)
    SequenceWeight(token=0.25, denominator=1.0)
    """
    return SequenceWeight(1.0 / tokens, 1.0)


def sequence_sum(tokens: int, length: int) -> SequenceWeight:
    """The mean over sequences of the sum over tokens: REINFORCE's, with a scale that grows with length.

    >>> sequence_sum(4, 0)
    SequenceWeight(token=1.0, denominator=1.0)
    """
    return SequenceWeight(1.0, 1.0)


def constant(tokens: int, length: int) -> SequenceWeight:
    """``sequence_sum`` over a constant ``length`` (Dr. GRPO, arXiv:2503.20783, section 3.2), e.g. max_new_tokens.

    Raises ValueError when ``length`` is not positive.

    >>> constant(3, 4)
    SequenceWeight(token=0.25, denominator=1.0)
    """
    if length <= 0:
        raise ValueError(
            f"aggregation 'constant' divides by length={length}: set it to the most tokens of a completion"
        )
    return SequenceWeight(1.0 / length, 1.0)


AGGREGATIONS: dict[str, Callable[[int, int], SequenceWeight]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}
"""(number of loss tokens of a sequence, at least 1; length of ``constant``, unused by the others) -> its weight."""


def sequence_weight(aggregation: str, tokens: int, length: int = 0) -> SequenceWeight:
    """Weight of a sequence with ``tokens`` loss tokens. One without any (masked as overlong, say) adds to nothing.

    >>> sequence_weight("sequence_mean", 2), sequence_weight("sequence_mean", 0)
    (SequenceWeight(token=0.5, denominator=1.0), SequenceWeight(token=0.0, denominator=0.0))
    """
    return AGGREGATIONS[aggregation](tokens, length) if tokens else SequenceWeight(0.0, 0.0)


def token_weights(aggregation: str, loss_mask: BoolArray, length: int = 0) -> tuple[FloatArray, float]:
    """Weights [B, T] of the tokens of whole sequences, one in a row, and their part of the global denominator.

    >>> token_weights("sequence_mean", np.array([[True, True, False], [False, True, False]]))
    (array([[0.5, 0.5, 0. ],
           [0. , 1. , 0. ]], dtype=float32), 2.0)
    """
    rows = [sequence_weight(aggregation, int(tokens), length) for tokens in loss_mask.sum(axis=1)]
    weights = np.array([row.token for row in rows], dtype=np.float32)
    return np.where(loss_mask, weights[:, None], np.float32(0)), float(sum(row.denominator for row in rows))
