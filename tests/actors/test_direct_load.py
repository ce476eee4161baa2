"""What the direct load joins, and refuses to join."""

from __future__ import annotations

import pytest
import torch

from actors.direct_load import Collector, joined


class Layer(torch.nn.Module):
    """A linear layer whose weight was packed away."""

    prefix = "layers.0.qkv"
    params_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.packed: torch.Tensor | None = None
        self.quant_method = self

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.packed = self.weight.detach().clone()


def test_neighbours_in_memory_are_joined_without_a_copy() -> None:
    flat = torch.arange(20.0)
    q, k = flat[2:8].view(2, 3), flat[8:14].view(2, 3)
    whole = joined([q, k])
    assert whole.tolist() == flat[2:14].view(4, 3).tolist() and whole.data_ptr() == q.data_ptr()


@pytest.mark.parametrize("gap", [1, -6])
def test_parts_that_are_no_neighbours_are_copied(gap: int) -> None:
    flat = torch.arange(30.0)
    q, k = flat[10:16].view(2, 3), flat[16 + gap : 22 + gap].view(2, 3)
    whole = joined([q, k])
    assert whole.tolist() == [*q.tolist(), *k.tolist()] and whole.data_ptr() != q.data_ptr()


def test_parts_go_in_the_order_of_the_fused_weight_whatever_order_they_come_in() -> None:
    layer = Layer()
    collector = Collector(layer, (3, 2))
    for name, value in (("v", 3.0), ("q", 1.0), ("k", 2.0)):
        layer.weight.weight_loader(layer.weight, torch.full((1, 2), value), name)
    collector.finish()
    assert layer.packed is not None and layer.packed[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_missing_part_is_an_error_and_no_part_leaves_the_layer_alone() -> None:
    layer = Layer()
    collector = Collector(layer, (3, 2))
    collector.finish()
    assert layer.packed is None
    layer.weight = collector.kept
    collector = Collector(layer, (3, 2))
    layer.weight.weight_loader(layer.weight, torch.zeros(1, 2), "q")
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.qkv\.weight of shape \(3, 2\) cannot be made of \{'q': \(1, 2\)"
    ):
        collector.finish()


def test_weights_arrive_in_the_engines_own_type() -> None:
    layer = Layer()
    layer.params_dtype = torch.bfloat16  # type: ignore[misc]
    collector = Collector(layer, (1, 2))
    layer.weight.weight_loader(layer.weight, torch.tensor([[1.0, 2.0]]))
    collector.finish()
    assert layer.packed is not None and layer.packed.dtype == torch.bfloat16


class Model(torch.nn.Module):
    """Loads its one layer by the weight's own loader, or past it."""

    def __init__(self, past: bool) -> None:
        super().__init__()
        self.linear, self.past = Layer(), past

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        parameter = dict(self.named_parameters())["linear.weight"]
        for _, tensor in weights:
            if self.past:
                parameter.data.copy_(tensor)
            else:
                parameter.weight_loader(parameter, tensor)
        return {"linear.weight"}


@pytest.mark.vllm
@pytest.mark.parametrize("past", [False, True])
def test_a_model_that_copies_past_the_loader_is_left_to_the_other_way(
    past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors import direct_load

    monkeypatch.setattr("vllm.model_executor.layers.linear.LinearBase", Layer)
    monkeypatch.setattr(direct_load, "weight_shape", lambda layer: (1, 2))
    model = Model(past)
    kept = model.linear.weight
    reached = direct_load.load(model, [("linear.weight", torch.tensor([[1.0, 2.0]]))])
    if past:
        assert reached is None and model.linear.weight is kept and model.linear.packed is None
    else:
        assert reached == {"linear.weight"} and model.linear.packed is not None
        assert model.linear.packed.tolist() == [[1.0, 2.0]]
