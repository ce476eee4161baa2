"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rl.config import Learner


def lr_at(update: int, learner: Learner, total_updates: int) -> float:
    """The learning rate of optimizer update number ``update``, counted from 0.

    It rises linearly over ``warmup_steps`` updates (the first takes 1 / warmup_steps of the peak, the last all of it),
    then goes by ``lr_schedule`` to ``lr_final_ratio`` of the peak, which update ``total_updates`` - 1 takes.

    >>> settings = Learner(lr=1.0, lr_schedule="linear", lr_final_ratio=0.1, warmup_steps=2)
    >>> [round(lr_at(update, settings, 6), 4) for update in range(7)]
    [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]
    """
    if update < learner.warmup_steps:
        return learner.lr * (update + 1) / learner.warmup_steps
    progress = min(1.0, (update - learner.warmup_steps) / max(1, total_updates - 1 - learner.warmup_steps))
    if learner.lr_schedule == "linear":
        part = 1.0 - progress
    elif learner.lr_schedule == "cosine":
        part = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        return learner.lr
    return learner.lr * (learner.lr_final_ratio + (1.0 - learner.lr_final_ratio) * part)


def make_optimizer(parameters: Mapping[str, nn.Parameter], learner: Learner) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101). Weight decay falls on matrices only: biases and the gains of norms are spared."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": learner.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learner.lr,
        betas=learner.betas,
        eps=learner.adam_epsilon,
        fused=True,  # one pass over each parameter instead of about ten
    )


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The moments under ``NAME.exp_avg`` and ``NAME.exp_avg_sq``, on the CPU; empty before the first update."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment].detach().cpu()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in ("exp_avg", "exp_avg_sq")
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
    updates: int,
) -> None:
    """Puts back what ``optimizer_state`` gave after ``updates`` updates; ValueError when it is of another model."""
    wanted = {f"{name}.{moment}" for name in parameters for moment in ("exp_avg", "exp_avg_sq")} if updates else set()
    if wanted != set(state):
        differing = sorted(wanted.symmetric_difference(state))
        raise ValueError(
            f"optimizer state does not fit the model: {len(differing)} names differ, first {differing[0]!r}"
        )
    for name, parameter in parameters.items() if updates else ():
        moments = {moment: state[f"{name}.{moment}"] for moment in ("exp_avg", "exp_avg_sq")}
        for moment, tensor in moments.items():
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"optimizer state {name}.{moment} has shape {tuple(tensor.shape)}, "
                    f"the parameter {tuple(parameter.shape)}"
                )
        optimizer.state[parameter] = {
            # fused kernels read the count on the parameter's own device
            "step": torch.tensor(float(updates), dtype=torch.float32, device=parameter.device),
            **{moment: tensor.to(parameter.device, parameter.dtype).clone() for moment, tensor in moments.items()},
        }
