"""The train step: invariances of the gradient, the shift, the schedule, and what stops it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl.config import Algorithm, Learner, Settings
from rl.device import DEVICES
from rl.flat import FlatParameters
from rl.optim import load_optimizer_state, lr_at, make_optimizer, optimizer_state
from rl.packing import pack
from rl.train_step import Trainer, clip_, forward_tokens, train_step, train_update
from rl.types import RankBatch, TrainSample


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2,
        )
    )  # fmt: skip


def make_trainer(algorithm: dict | None = None, total: int = 10, seed: int = 0, **learner) -> Trainer:
    settings = Settings(
        train={"steps": 1}, algorithm=Algorithm(**(algorithm or {})), learner=Learner(**({"lr": 1e-2} | learner))
    )
    model = tiny_model(seed)
    flat = FlatParameters(model)
    optimizer = make_optimizer(dict(model.named_parameters()), settings.learner)
    return Trainer(model, flat, optimizer, settings, DEVICES["cpu"], total)


def sample(length: int, advantage: float, seed: int, prompt: int = 1, group: str = "g") -> TrainSample:
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= prompt
    return TrainSample(
        group_id=group,
        token_ids=rng.integers(0, 64, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, rng.normal(-4, 0.3, length), 0).astype(np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        version_spans=((0, length - prompt),),
        has_signal=advantage != 0,
    )


RAGGED = [sample(length, advantage, seed) for seed, (length, advantage) in
          enumerate([(2, 1.0), (8, -0.5), (1 + 1, 0.7), (13, -1.2)])]  # fmt: skip


def gradient(batches: Sequence[RankBatch]) -> torch.Tensor:
    """The clipped-away-from gradient of update 0, each rank's added up, as the all-reduce would."""
    total: torch.Tensor | None = None
    for batch in batches:
        trainer = make_trainer(max_grad_norm=1e9)
        trainer.optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
        micro_batches = batch.updates[0]
        train_update(trainer, micro_batches, [None] * len(micro_batches), None, "test")
        flat = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        total = flat if total is None else total + flat
    assert total is not None
    return total


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return gradient(pack(RAGGED, world_size=1, updates=1, max_tokens=1000, step=0))


@pytest.mark.parametrize("rows", [4, 2, 1])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1]])
def test_gradients_do_not_depend_on_how_samples_are_dealt(reference, rows, world_size, order):
    batches = pack([RAGGED[i] for i in order], world_size=world_size, updates=1, max_tokens=16 * rows, step=0)
    assert len(batches[0].updates[0]) <= len(RAGGED) // min(rows, 2) and reference.norm() > 0.1
    torch.testing.assert_close(gradient(batches), reference, atol=1e-6, rtol=0)


def test_an_uneven_split_over_two_workers_gives_the_same_gradient(reference):
    parts = []
    for share in (RAGGED[:3], RAGGED[3:]):
        (batch,) = pack(share, world_size=1, updates=1, max_tokens=16, step=0)
        global_count = tuple(replace(m, loss_denominator=21.0) for m in batch.updates[0])
        parts.append(replace(batch, updates=(global_count,)))
    assert [sum(len(m.targets) for m in part.updates[0]) for part in parts] == [3, 1]
    torch.testing.assert_close(gradient(parts), reference, atol=1e-6, rtol=0)


def test_the_gradient_is_that_of_the_written_out_loss(reference):
    model = tiny_model()
    losses, count = [], 0
    for s in RAGGED:
        ids = torch.tensor(s.token_ids, dtype=torch.long)
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        for t in np.flatnonzero(s.loss_mask):
            ratio = torch.exp(logprobs[t - 1] - float(s.rollout_logprobs[t]))
            advantage = float(s.advantages[t])
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            count += 1
    (torch.stack(losses).sum() / count).backward()
    assert count == 1 + 7 + 1 + 12
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(reference, expected, atol=1e-6, rtol=0)


def test_leaving_out_flat_groups_changes_no_gradient():
    flat_group = [sample(9, 0.0, 7, group="flat"), sample(5, 0.0, 8, group="flat")]
    kept = [TrainSample(s.group_id, s.token_ids, s.loss_mask, s.rollout_logprobs, s.advantages, s.version_spans, True)
            for s in flat_group]  # fmt: skip
    left_out = gradient(pack(RAGGED + flat_group, world_size=1, updates=1, max_tokens=64, step=0))
    passed_through = gradient(pack(RAGGED + kept, world_size=1, updates=1, max_tokens=64, step=0))
    torch.testing.assert_close(left_out, passed_through, atol=1e-7, rtol=0)
    alone = gradient(pack(RAGGED, world_size=1, updates=1, max_tokens=64, step=0))
    torch.testing.assert_close(left_out, alone * 21 / (21 + 8 + 4), atol=1e-6, rtol=0)  # their tokens do count


class Nudged(torch.nn.Module):
    """The model with one logit moved."""

    def __init__(self, model: LlamaForCausalLM, position: int, token: int, by: float) -> None:
        super().__init__()
        self.model, self.position, self.token, self.by = model, position, token, by

    def forward(self, input_ids, use_cache=False):
        output = self.model(input_ids=input_ids, use_cache=use_cache)
        output.logits = output.logits.clone()
        output.logits[0, self.position, self.token] += self.by
        return output


def test_the_loss_sees_exactly_the_sampled_tokens():
    eos = 0
    one = TrainSample("g", np.int32([1, 2, 3, 7, 8, eos]), np.array([0, 0, 0, 1, 1, 1], bool), np.float32([0] * 6),
                      np.float32([0, 0, 0, 1, 1, 1]), ((0, 3),))  # fmt: skip
    (batch,) = pack([one], world_size=1, updates=1, max_tokens=64, step=0)

    def logprob_sum(position: int, token: int, by: float = 1.0) -> float:
        trainer = make_trainer()
        trainer.model = Nudged(trainer.model, position, token, by)  # type: ignore[arg-type]
        trainer.takes_logits_to_keep = False
        tokens = forward_tokens(trainer, batch.updates[0][0])
        return torch.where(tokens.loss_mask, tokens.logprobs, 0.0).sum().item()

    plain = logprob_sum(0, token=7, by=0.0)
    assert logprob_sum(2, token=7) > plain + 0.1  # position of prompt token 3, logit of the answer's first token
    assert logprob_sum(3, token=8) > plain + 0.1
    assert logprob_sum(4, token=eos) > plain + 0.1
    for position in (0, 1, 5, 6, 7):  # the prompt, the position after EOS, padding
        assert logprob_sum(position, token=7) == plain


def test_garbage_in_padding_changes_nothing():
    (clean,) = pack(RAGGED, world_size=1, updates=1, max_tokens=1000, step=0)
    (dirty,) = pack(RAGGED, world_size=1, updates=1, max_tokens=1000, step=0)
    micro = dirty.updates[0][0]
    micro.rollout_logprobs[~micro.loss_mask] = np.nan
    micro.advantages[~micro.loss_mask] = -1e10
    assert np.isnan(micro.rollout_logprobs).any()
    first, second = make_trainer(), make_trainer()
    assert train_step(first, clean) == train_step(second, dirty)
    assert torch.equal(first.flat.params[torch.float32], second.flat.params[torch.float32])


def test_metrics_of_a_step():
    trainer = make_trainer()
    on_policy = []
    with torch.no_grad():
        for s in RAGGED:
            ids = torch.tensor(s.token_ids, dtype=torch.long)[None]
            full = trainer.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            exact = full.gather(-1, ids[0, 1:, None])[:, 0].numpy()
            shifted = np.where(s.loss_mask, np.concatenate([[0], exact + 0.1]), 0).astype(np.float32)
            on_policy.append(TrainSample("g", s.token_ids, s.loss_mask, shifted, s.advantages, s.version_spans))
    (batch,) = pack(on_policy, world_size=1, updates=1, max_tokens=16, step=0)
    metrics = train_step(trainer, batch)
    ratio = math.exp(-0.1)
    assert metrics["tokens/trained"] == 21
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["mismatch/max_abs"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["policy/kl"] == pytest.approx(ratio - 1 + 0.1, abs=1e-6)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/loss"] == pytest.approx(-ratio * (1.0 - 3.5 + 0.7 - 14.4) / 21, rel=1e-4)
    assert metrics["policy/lr"] == 0.01
    assert 2.0 < metrics["policy/entropy"] < math.log(64)
    assert metrics["policy/grad_norm"] > 0 and trainer.updates == 1


def test_old_logprobs_of_the_learner_are_taken_before_the_first_update():
    samples = [sample(9, a, i, group=f"g{i}") for i, a in enumerate([1.0, -1.0])]
    (batch,) = pack(samples, world_size=1, updates=2, max_tokens=64, step=0)
    trainer = make_trainer({"old_logprobs": "learner"}, total=2, lr_schedule="constant")
    before = {u: forward_tokens(trainer, batch.updates[u][0]).logprobs.detach() for u in (0, 1)}
    metrics = train_step(trainer, batch)
    # replay by hand: update 0 starts with ratio 1; update 1's ratio is against the weights before update 0
    other = make_trainer({"old_logprobs": "learner"}, total=2, lr_schedule="constant")
    first = train_update(other, batch.updates[0], [before[0]], None, "")
    second = train_update(other, batch.updates[1], [before[1]], None, "")
    assert first["kl"] == 0 and second["kl"] > 1e-4
    assert metrics["policy/kl"] == pytest.approx((first["kl"] + second["kl"]) / 16)
    assert torch.equal(trainer.flat.params[torch.float32], other.flat.params[torch.float32])
    assert metrics["mismatch/mean_abs"] > 0.1  # of the sampler's log-probabilities, read in the first update only


def test_nothing_to_learn_from():
    trainer = make_trainer(weight_decay=0.1)
    weights = trainer.flat.params[torch.float32].clone()
    (nothing,) = pack([], world_size=1, updates=2, max_tokens=64, step=0)
    assert train_step(trainer, nothing) == {"tokens/trained": 0.0}
    assert trainer.updates == 0 and torch.equal(trainer.flat.params[torch.float32], weights)

    # flat groups only: an update with a zero gradient. Nothing moves at first ...
    plain = make_trainer()
    (flat,) = pack([sample(6, 0.0, 1)], world_size=1, updates=1, max_tokens=64, step=0)
    metrics = train_step(plain, flat)
    assert metrics["policy/loss"] == 0 and metrics["policy/grad_norm"] == 0 and "policy/kl" not in metrics
    assert plain.updates == 1 and torch.equal(plain.flat.params[torch.float32], weights)
    # ... but the moments of an earlier update carry on, as AdamW means them to
    (signal,) = pack(RAGGED, world_size=1, updates=1, max_tokens=64, step=0)
    train_step(plain, signal)
    moved = plain.flat.params[torch.float32].clone()
    train_step(plain, flat)
    assert (
        not torch.equal(plain.flat.params[torch.float32], moved)
        and torch.isfinite(plain.flat.params[torch.float32]).all()
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(bad):
    broken = sample(6, 1.0, 3)
    broken.advantages[broken.loss_mask] = bad
    trainer = make_trainer()
    weights = trainer.flat.params[torch.float32].clone()
    (batch,) = pack([*RAGGED, broken], world_size=1, updates=1, max_tokens=64, step=17)
    with pytest.raises(RuntimeError, match="step 17, update 1 of 1"):
        train_step(trainer, batch)
    assert torch.equal(trainer.flat.params[torch.float32], weights) and trainer.updates == 0


def test_the_reduction_is_asked_for_on_every_rank_and_completes_the_gradient():
    first, second = pack(RAGGED[:1], world_size=2, updates=1, max_tokens=64, step=0)
    assert not second.updates[0]
    asked: list[tuple[int, str]] = []

    def record(tensor: torch.Tensor, operation: Literal["sum", "max"]) -> None:
        asked.append((tensor.numel(), operation))

    counts = []
    for batch in (first, second):
        asked.clear()
        trainer = make_trainer()
        trainer.all_reduce = record
        train_step(trainer, batch)
        counts.append(list(asked))
    assert counts[0] == counts[1] and len(counts[0]) >= 3


def test_clip_hand_values():
    gradients = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert clip_(gradients, 1.0).item() == 5.0
    assert gradients[0].item() == pytest.approx(0.6) and gradients[1].tolist() == pytest.approx([0.0, 0.8])
    assert clip_(gradients, 2.0).item() == pytest.approx(1.0)
    assert gradients[0].item() == pytest.approx(0.6)


def test_schedule_hand_values():
    def rates(updates: int, total: int, **values) -> list[float]:
        return [round(lr_at(u, Learner(lr=1.0, **values), total), 6) for u in range(updates)]

    assert rates(6, 5, lr_final_ratio=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates(5, 5, lr_schedule="cosine", lr_final_ratio=0.0) == [1.0, 0.853553, 0.5, 0.146447, 0.0]
    assert rates(4, 4, lr_schedule="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(6, 6, lr_schedule="cosine", lr_final_ratio=0.5, warmup_steps=3) == [
        0.333333,
        0.666667,
        1,
        1,
        0.75,
        0.5,
    ]
    assert rates(2, 1) == [1.0, 0.1]  # past its end the schedule stays at the end
    assert rates(3, 2, warmup_steps=4) == [0.25, 0.5, 0.75]


def test_adamw_hand_values_and_decay_on_matrices_only():
    matrix, vector = torch.nn.Parameter(torch.full((2, 2), 2.0)), torch.nn.Parameter(torch.full((2,), 2.0))
    matrix.grad, vector.grad = torch.full((2, 2), 0.5), torch.full((2,), -0.5)
    optimizer = make_optimizer({"m": matrix, "v": vector}, Learner(lr=0.1, weight_decay=0.5, adam_epsilon=1e-12))
    optimizer.step()
    # the first step of Adam is lr times the sign; decay takes lr * weight_decay of a matrix
    assert matrix.detach().flatten().tolist() == pytest.approx([2.0 * (1 - 0.05) - 0.1] * 4, rel=1e-5)
    assert vector.detach().tolist() == pytest.approx([2.1] * 2, rel=1e-5)


def test_optimizer_state_by_name_continues_bit_for_bit():
    (batch,) = pack(RAGGED, world_size=1, updates=1, max_tokens=16, step=0)
    values = {"lr_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01}
    straight = make_trainer(total=6, **values)
    rates = [train_step(straight, batch)["policy/lr"] for _ in range(6)]

    half = make_trainer(total=6, **values)
    first = [train_step(half, batch)["policy/lr"] for _ in range(3)]
    saved = {name: tensor.clone() for name, tensor in optimizer_state(half.optimizer, names(half)).items()}
    resumed = make_trainer(total=6, seed=5, **values)
    resumed.flat.params[torch.float32].copy_(half.flat.params[torch.float32])
    load_optimizer_state(resumed.optimizer, names(resumed), saved, 3)
    resumed.updates = 3
    second = [train_step(resumed, batch)["policy/lr"] for _ in range(3)]
    assert first + second == rates and len(set(rates)) == 5  # the peak is taken twice
    assert torch.equal(resumed.flat.params[torch.float32], straight.flat.params[torch.float32])
    ours, theirs = (
        optimizer_state(resumed.optimizer, names(resumed)),
        optimizer_state(straight.optimizer, names(straight)),
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "model.norm.weight.exp_avg_sq" in ours and len(ours) == 2 * len(names(resumed))

    with pytest.raises(ValueError, match=r"model\.norm\.weight\.exp_avg"):
        load_optimizer_state(
            resumed.optimizer, names(resumed), saved | {"model.norm.weight.exp_avg": torch.zeros(3)}, 3
        )
    del saved["model.norm.weight.exp_avg"]
    with pytest.raises(ValueError, match=r"1 names differ, first 'model\.norm\.weight\.exp_avg'"):
        load_optimizer_state(resumed.optimizer, names(resumed), saved, 3)


def names(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    return dict(trainer.model.named_parameters())


def test_bfloat16_is_close_and_its_weights_stay_float32():
    (batch,) = pack(RAGGED, world_size=1, updates=1, max_tokens=64, step=0)
    exact, rough = make_trainer(), make_trainer(precision="bfloat16")
    one, two = train_step(exact, batch), train_step(rough, batch)
    assert rough.flat.params[torch.float32].dtype == torch.float32
    assert 0 < abs(one["policy/loss"] - two["policy/loss"]) < 0.1
    assert abs(one["mismatch/mean_abs"] - two["mismatch/mean_abs"]) < 0.05


def test_temperature_is_part_of_the_log_probability():
    settings = Settings(train={"steps": 1}, rollout={"temperature": 0.5})
    hot, cold = make_trainer(), make_trainer()
    cold.settings = settings
    micro = pack(RAGGED[3:], world_size=1, updates=1, max_tokens=64, step=0)[0].updates[0][0]
    ids = torch.tensor(RAGGED[3].token_ids, dtype=torch.long)
    logits = hot.model(input_ids=ids[None]).logits[0, :-1]
    expected = (logits / 0.5).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(forward_tokens(cold, micro).logprobs[0, :12], expected, atol=1e-5, rtol=0)
    assert (forward_tokens(hot, micro).logprobs[0, :12] - expected).abs().max() > 0.1
