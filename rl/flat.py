"""A model's parameters and gradients as views into flat tensors, one per dtype.

Two things then cost nothing: one all-reduce of all gradients, and laying the weights out in large buckets for the
sampler (the flat tensor already is the bucket).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from rl.types import TensorMeta

ALIGNMENT = 64
"""Bytes: every parameter starts at a multiple of it, a cache line and the widest vector register."""

Bytes = npt.NDArray[np.uint8]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that ``TensorMeta.dtype`` carries.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


class FlatParameters:
    """Moves the trainable parameters of ``model`` into one flat tensor per dtype, and their gradients likewise.

    The model keeps its ``Parameter`` objects (an optimizer made before or after sees the same ones); only the storage
    behind them changes, so move the model to its device first. Gaps between parameters (``ALIGNMENT``) hold zeros in
    ``params`` and in ``grads``, so that norms over a flat tensor are norms over the parameters.

    A tied weight lies there once and appears under all its names in ``tensors``: a sampler that does not tie them gets
    gets its ``lm_head.weight`` too. Frozen parameters and persistent buffers are not in ``params``; ``tensors`` appends
    them.

    >>> layer = torch.nn.Linear(3, 2)
    >>> flat = FlatParameters(layer)
    >>> flat.params[torch.float32].numel(), flat.params[torch.float32][:6].equal(layer.weight.detach().flatten())
    (32, True)
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.params: dict[torch.dtype, torch.Tensor] = {}
        self.grads: dict[torch.dtype, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}  # id of a parameter -> every name it has, in the model's order
        self._spans: dict[int, int] = {}  # id of a trainable parameter -> first element in its flat tensor
        self._parameters: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._names:
                self._parameters.append(parameter)
            self._names.setdefault(id(parameter), []).append(name)
        self._trainable = [p for p in self._parameters if p.requires_grad]
        devices = {str(p.device) for p in self._trainable}
        if len(devices) != 1:
            raise ValueError(
                f"trainable parameters lie on {sorted(devices) or 'no device'}: exactly one device is needed"
            )
        for dtype in dict.fromkeys(p.dtype for p in self._trainable):
            self._flatten([p for p in self._trainable if p.dtype == dtype], dtype)

    def _flatten(self, parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
        """Copies ``parameters`` into a new flat tensor and makes each of them, and its gradient, a view."""
        step = max(1, ALIGNMENT // dtype.itemsize)
        size = 0
        for parameter in parameters:
            self._spans[id(parameter)] = size
            size += -(-parameter.numel() // step) * step
        flat = torch.zeros(size, dtype=dtype, device=parameters[0].device)
        self.params[dtype], self.grads[dtype] = flat, torch.zeros_like(flat)
        for parameter in parameters:
            view = self._view(flat, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            gradient = self._view(self.grads[dtype], parameter)
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def _view(self, flat: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        start = self._spans[id(parameter)]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def zero_grad(self) -> None:
        """Zeroes the gradients in place; use it instead of the model's or the optimizer's, which would drop the views.

        A parameter whose ``grad`` was replaced all the same gets its view back.
        """
        for flat in self.grads.values():
            flat.zero_()
        for parameter in self._trainable:
            view = self._view(self.grads[parameter.dtype], parameter)
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view

    @torch.no_grad()
    def tensors(self, bucket_bytes: int) -> tuple[list[TensorMeta], list[Bytes]]:
        """Everything a sampler needs, as flat uint8 buckets of at most ``bucket_bytes``, cut between parameters.

        A tensor larger than that gets a bucket of its own. On the CPU the buckets are views (no copy is made): they
        show the weights of the moment at which they are read. From an accelerator they are copies in host memory.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, seen {bucket_bytes}")
        metas: list[TensorMeta] = []
        buckets: list[Bytes] = []
        for dtype, flat in self.params.items():
            raw = flat.view(torch.uint8).cpu().numpy()
            parameters = [p for p in self._trainable if p.dtype == dtype]
            starts = [self._spans[id(p)] * dtype.itemsize for p in parameters] + [raw.nbytes]
            for first, last in _cuts(starts, bucket_bytes):
                for i in range(first, last):
                    metas += self._named(parameters[i], len(buckets), starts[i] - starts[first])
                buckets.append(raw[starts[first] : starts[last]])
        self._append_rest(metas, buckets)
        return metas, buckets

    def _named(self, parameter: torch.nn.Parameter, bucket: int, offset: int) -> Iterator[TensorMeta]:
        for name in self._names[id(parameter)]:
            yield TensorMeta(name, dtype_name(parameter.dtype), tuple(parameter.shape), bucket, offset)

    def _append_rest(self, metas: list[TensorMeta], buckets: list[Bytes]) -> None:
        """Frozen parameters and persistent buffers, copied into one more bucket if there are any."""
        known = {meta.name for meta in metas}
        rest = {name: t for name, t in self.model.state_dict().items() if name not in known and torch.is_tensor(t)}
        places: dict[int, int] = {}  # tensors that are tied to one another are stored once
        pieces: list[Bytes] = []
        offset = 0
        for name, tensor in rest.items():
            key = tensor.data_ptr()
            if key not in places or tensor.numel() == 0:
                piece = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
                places[key] = offset
                pieces.append(np.pad(piece, (0, -piece.nbytes % ALIGNMENT)))
                offset += pieces[-1].nbytes
            metas.append(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), len(buckets), places[key]))
        if pieces:
            buckets.append(np.concatenate(pieces))


def _cuts(starts: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of consecutive pieces that together take at most ``limit`` bytes, each at least one piece.

    >>> list(_cuts([0, 10, 20, 90, 100], 30))
    [(0, 2), (2, 3), (3, 4)]
    """
    first = 0
    for i in range(1, len(starts) - 1):
        if starts[i + 1] - starts[first] > limit:
            yield first, i
            first = i
    yield first, len(starts) - 1
