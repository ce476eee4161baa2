"""What differs between the devices a learner can train on: one small class for each, found in ``DEVICES``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch


class Device(Protocol):
    """The few things the train step has to ask its device for."""

    name: str
    dist_backend: str

    def torch_device(self, local_rank: int) -> torch.device:
        """Where the tensors of this process live; ``local_rank`` counts the ranks of one host."""
        ...

    def autocast(self, precision: Literal["float32", "bfloat16"]) -> AbstractContextManager[object]:
        """The context for forward passes: nothing in float32, bfloat16 arithmetic over float32 weights otherwise."""
        ...

    def synchronise(self) -> None:
        """Waits until everything queued has run; call it before a clock is read."""
        ...


class Cpu:
    """The processor: runs everything where it is written, so there is nothing to wait for."""

    name = "cpu"
    dist_backend = "gloo"

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def autocast(self, precision: Literal["float32", "bfloat16"]) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext()

    def synchronise(self) -> None:
        return None


class Cuda:
    """One NVIDIA GPU for each rank. Ray shows a worker its own GPUs only, so the current device is the right one."""

    name = "cuda"
    dist_backend = "nccl"

    def torch_device(self, local_rank: int) -> torch.device:
        if not torch.cuda.is_available():
            raise ValueError("learner.device: cuda, but torch sees no CUDA device here; use learner.device: cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def autocast(self, precision: Literal["float32", "bfloat16"]) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if precision == "bfloat16" else nullcontext()

    def synchronise(self) -> None:
        torch.cuda.synchronize()


DEVICES: dict[str, Device] = {"cpu": Cpu(), "cuda": Cuda()}
