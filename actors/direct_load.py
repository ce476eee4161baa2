"""Loads weights on the CPU without the copies that vLLM's layerwise reload makes.

On the CPU vLLM packs a linear layer's weight for oneDNN and throws the plain one away. The layerwise reload therefore
allocates every plain weight again, copies the sources into it and packs it. Here the sources are packed as they lie in
the bucket: the parts of a fused weight (q, k, v; gate, up) lie one after another there, and are joined first only where
they do not. Everything else (embeddings, norms, biases) is loaded in place by vLLM's own loaders.

It is offered only for models in which it is known to be right (``takes``), and proven like every other load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Part = int | str | None
"""Which part of a fused weight: "q", "k", "v"; 0, 1, ...; None for the whole."""


class Collector:
    """Stands in for a linear layer's weight while a model loads: keeps what it is given instead of copying it."""

    def __init__(self, layer: Any, shape: Sequence[int]) -> None:
        import torch

        self.layer, self.kept = layer, layer.weight
        self.parts: dict[Part, torch.Tensor] = {}
        stand_in = torch.nn.Parameter(torch.empty(tuple(shape), device="meta"), requires_grad=False)
        stand_in.weight_loader = self.collect  # type: ignore[attr-defined]
        layer.weight = stand_in
        self.shape = tuple(shape)

    def collect(self, _: Any, loaded: torch.Tensor, part: Part = None) -> None:
        self.parts[part] = loaded

    def finish(self) -> None:
        """Packs what was collected. Without any part the layer keeps its old weight, and is reported as missing.

        RuntimeError when the parts do not make up the weight.
        """
        if not self.parts:
            return
        whole = joined([self.parts[part] for part in sorted(self.parts, key=_order)])
        if tuple(whole.shape) != self.shape:
            shapes = {part: tuple(tensor.shape) for part, tensor in self.parts.items()}
            raise RuntimeError(f"{self.layer.prefix}.weight of shape {self.shape} cannot be made of {shapes}")
        import torch

        self.layer.weight = torch.nn.Parameter(whole.to(self.layer.params_dtype), requires_grad=False)
        pack(self.layer)


def _order(part: Part) -> int:
    return part if isinstance(part, int) else 0 if part is None else "qkv".index(part)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[N1 + N2 + ..., K] of tensors [Ni, K]; a view where they lie one after another in memory already."""
    import torch

    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.dtype != first.dtype:
            return torch.cat(list(parts))
        end += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    storage = torch.empty(0, dtype=first.dtype).set_(first.untyped_storage())
    return storage.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def takes(model: Any) -> bool:
    """Whether every layer of a vLLM model is one that ``load`` knows: on a CPU, unquantized, on one worker."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.platforms import current_platform

    def known(layer: Any) -> bool:
        if isinstance(layer, LinearBase):
            plain = type(layer.quant_method) is UnquantizedLinearMethod and len(weight_shape(layer)) == 2
            return plain and layer.tp_size == 1 and not getattr(layer, "_cpu_skip_gemm_dispatch", False)
        if isinstance(layer, VocabParallelEmbedding):
            return type(layer.quant_method) is UnquantizedEmbeddingMethod
        return getattr(layer, "quant_method", None) is None

    return bool(current_platform.is_cpu()) and all(known(layer) for layer in model.modules())


def weight_shape(layer: Any) -> tuple[int, ...]:
    """The shape of a linear layer's weight before it was packed, as vLLM noted it for its own reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    weight = get_layerwise_info(layer).restore_metadata[0].get("weight")
    return tuple(weight.shape) if weight is not None else ()


def load(model: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> set[str] | None:
    """Loads named tensors in the checkpoint's layout; returns the model's own names of what it loaded.

    None where the model's own code copies into a linear layer's weight past its loader: then load it in another way.
    """
    import torch
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layers = dict(model.named_modules())
    with torch.no_grad():
        collectors = {
            f"{name}.weight": Collector(layer, weight_shape(layer))
            for name, layer in layers.items()
            if isinstance(layer, LinearBase)
        }
        try:
            loaded = set(model.load_weights(weights))
        finally:
            for collector in collectors.values():
                collector.layer.weight = collector.kept
        if any(name in loaded and not collector.parts for name, collector in collectors.items()):
            return None
        for collector in collectors.values():
            collector.finish()
        for layer in layers.values():
            if isinstance(layer, VocabParallelEmbedding):  # packed for its use as a head
                pack(layer)
    return loaded


def pack(layer: Any) -> None:
    """Packs a layer's weight; the old packed one goes first, so that the new one takes its very place in memory."""
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)
