"""The learner on real Ray Train workers, against the same training done in this process without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.inbox import Command, Failure, Inbox
from actors.learner import load_model, random_states, seed_everything, set_random_states
from actors.learner_group import LearnerGroup
from rl.config import Settings
from rl.device import DEVICES
from rl.flat import FlatParameters
from rl.optim import make_optimizer, optimizer_state
from rl.packing import pack
from rl.train_step import Trainer, one_rank, train_step
from rl.types import RankBatch, TrainSample

TOTAL = 8
LEARNER = {"lr": 3e-3, "lr_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01, "updates_per_batch": 2}


def make_settings(**learner: Any) -> Settings:
    return Settings.model_validate({"train": {"steps": 4}, "learner": LEARNER | learner})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    return str(folder)


def batches(step: int, world_size: int, bad: bool = False) -> list[RankBatch]:
    """Two updates of five ragged samples in four groups; the last group of an odd step is flat."""
    rng = np.random.default_rng(step)
    samples = []
    for i, length in enumerate([4, 9, 3, 14, 6]):
        mask = np.arange(length) >= 2
        advantage = 0.0 if i == 4 and step % 2 else float(rng.choice([-1.0, 1.0]))
        samples.append(
            TrainSample(
                group_id=str(max(1, i)),
                token_ids=rng.integers(0, 64, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, rng.normal(-5, 0.5, length), 0).astype(np.float32),
                advantages=np.where(mask, np.nan if bad else advantage, 0).astype(np.float32),
                version_spans=((step, length - 2),),
                has_signal=advantage != 0,
            )
        )
    return pack(samples, world_size=world_size, updates=2, max_tokens=16, step=step)


def train_here(
    model_path: str, steps: int, world_size: int = 1
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics of every step, then weights and moments by name; ranks are threads that add their tensors up."""
    torch.set_num_threads(1)
    barrier = threading.Barrier(world_size)
    mine: dict[int, torch.Tensor] = {}
    results: dict[int, Any] = {}
    settings = make_settings()
    models = [load_model(model_path, settings) for _ in range(world_size)]  # transformers cannot load in two threads

    def run(rank: int) -> None:
        def reduce(tensor: torch.Tensor, operation: str) -> None:
            mine[rank] = tensor.clone()
            barrier.wait()
            tensor.copy_(sum(mine.values()) if operation == "sum" else torch.stack(list(mine.values())).amax(0))
            barrier.wait()

        model = models[rank]
        flat, named = FlatParameters(model), dict(model.named_parameters())
        optimizer = make_optimizer(named, settings.learner)
        trainer = Trainer(
            model, flat, optimizer, settings, DEVICES["cpu"], TOTAL, all_reduce=reduce if world_size > 1 else one_rank
        )
        metrics = [train_step(trainer, batches(step, world_size)[rank]) for step in range(steps)]
        state = {name: p.detach() for name, p in named.items()} | optimizer_state(optimizer, named)
        results[rank] = metrics, state

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(1, world_size):
        assert results[rank][0] == results[0][0]
    return results[0]


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "model.safetensors")
    return weights | load_file(folder / "trainer" / "optimizer.safetensors")


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.ray
def test_two_workers_survive_a_kill_and_equal_the_undisturbed_run(ray_cluster, model_path, tmp_path):
    expected_metrics, expected = train_here(model_path, 4, world_size=2)
    group = LearnerGroup.start(make_settings(workers=2), model_path, tmp_path, TOTAL, None)
    try:
        ranks = group.describe()
        assert [r["rank"] for r in ranks] == [0, 1] and ranks[0]["pid"] != ranks[1]["pid"]
        assert ranks[0]["device"] == "cpu" and ranks[0]["node_id"] and ranks[0]["host"]
        metrics = [group.train(batches(0, 2))]
        group.save(new_folder(tmp_path / "after_0"))
        assert [p.name for p in (tmp_path / "batches").iterdir()] == ["step_0.pkl"]
        group.checkpointed(0, tmp_path / "after_0")
        assert not list((tmp_path / "batches").iterdir())
        metrics += [group.train(batches(1, 2)), group.train(batches(2, 2))]

        os.kill(ranks[1]["pid"], signal.SIGKILL)
        metrics.append(group.train(batches(3, 2)))  # restarts from after_0, trains 1 and 2 again, then 3
        assert group.restarts == 1
        assert {r["pid"] for r in group.describe()}.isdisjoint({r["pid"] for r in ranks})
        group.save(new_folder(tmp_path / "after_3"))
        assert_equal(saved_state(tmp_path / "after_3"), expected)
        assert metrics == expected_metrics
        assert json.loads((tmp_path / "after_3" / "trainer" / "trainer.json").read_text())["updates"] == TOTAL
    finally:
        group.close()
    # what two workers trained is what one would have
    _, alone = train_here(model_path, 4)
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-4)


@pytest.mark.ray
def test_one_worker_saves_resumes_publishes_and_says_why_it_failed(ray_cluster, model_path, tmp_path):
    expected_metrics, expected = train_here(model_path, 4)
    group = LearnerGroup.start(make_settings(), model_path, tmp_path / "a", TOTAL, None)
    try:
        metrics = [group.train(batches(step, 1)) for step in range(2)]
        assert group.publish(1).version == 1
        group.save(folder := new_folder(tmp_path / "saved"))
    finally:
        group.close()
    assert sorted(p.name for p in folder.iterdir() if p.name != "generation_config.json") == [
        "config.json", "model.safetensors", "tokenizer_config.json", "trainer",
    ]  # fmt: skip
    names = sorted(file.name for file in (folder / "trainer").iterdir())
    assert names == ["optimizer.safetensors", "rank_0.pt", "trainer.json"]
    assert json.loads((folder / "trainer" / "trainer.json").read_text()) == {
        "updates": 4,
        "version": 1,
        "world_size": 1,
    }
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), LlamaForCausalLM)

    group = LearnerGroup.start(make_settings(), model_path, tmp_path / "b", TOTAL, folder)
    try:
        metrics += [group.train(batches(step, 1)) for step in (2, 3)]
        assert [m["policy/lr"] for m in metrics] == [m["policy/lr"] for m in expected_metrics]
        assert metrics == expected_metrics
        group.save(new_folder(tmp_path / "end"))
        assert_equal(saved_state(tmp_path / "end"), expected)

        probe = group.publish(2).probe
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "end", dtype=torch.float32)
        ids = torch.tensor(probe.token_ids, dtype=torch.long)
        exact = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(probe.logprobs, exact.detach().numpy(), atol=1e-5)

        with pytest.raises(RuntimeError, match=r"rank 0 failed in 'train'(.|\n)*step 9, update 1 of 2: loss nan"):
            group.train(batches(9, 1, bad=True))
        assert group.restarts == 0  # it would only fail again
    finally:
        group.close()


@pytest.mark.ray
def test_a_kill_in_the_middle_of_a_step_costs_nothing_and_the_last_one_ends_the_run(ray_cluster, model_path, tmp_path):
    expected_metrics, _ = train_here(model_path, 2)
    group = LearnerGroup.start(make_settings(max_restarts=1), model_path, tmp_path, TOTAL, None)

    def kill() -> None:
        os.kill(group.describe()[0]["pid"], signal.SIGKILL)

    try:
        metrics = [group.train(batches(0, 1)), group.train(batches(1, 1), meanwhile=kill)]
        assert metrics == expected_metrics and group.restarts == 1
        with pytest.raises(RuntimeError, match=r"died in 'train' and was restarted 1 times already.*max_restarts=1"):
            group.train(batches(2, 1), meanwhile=kill)
    finally:
        group.close()


@pytest.mark.ray
def test_a_rank_that_hangs_is_not_waited_for_for_ever(ray_cluster, model_path, tmp_path):
    group = LearnerGroup.start(make_settings(step_timeout=4.0), model_path, tmp_path, TOTAL, None)
    pid = group.describe()[0]["pid"]
    try:
        group.train(batches(0, 1))
        with pytest.raises(
            RuntimeError, match=rf"did not finish 'train' within learner.step_timeout=4 s.*'pid': {pid}"
        ):
            group.train(batches(1, 1), meanwhile=lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        group.close()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the rank that hangs is still there"
        time.sleep(0.2)


@pytest.mark.ray
def test_a_start_that_cannot_succeed_says_what_is_missing(ray_cluster, model_path, tmp_path):
    settings = make_settings(workers=64, start_timeout=4.0)
    with pytest.raises(RuntimeError, match=r"start_timeout=4 s: ranks none of 64 have reported; the cluster has CPU 8"):
        LearnerGroup.start(settings, model_path, tmp_path, TOTAL, None)


def test_the_inbox_keeps_attempts_and_commands_apart():
    async def scenario() -> None:
        inbox = Inbox(world_size=1)
        await inbox.begin(0)
        given_up = asyncio.create_task(inbox.call(0, 0, Command("train")))  # nobody will read this answer
        queued = asyncio.create_task(inbox.call(0, 1, Command("save")))
        assert (await inbox.next(0, 0)).kind == "train"
        await inbox.done(0, 0, 0, "trained")
        await inbox.done(0, 0, 0, "again")
        assert await given_up == ["trained"]
        assert (await inbox.next(0, 1)).kind == "save"
        await inbox.done(0, 0, 0, "late")  # an answer to an old command
        assert not queued.done()

        await inbox.begin(1)  # the rank of attempt 0 is declared dead; its command is void, its words are not heard
        assert await queued is None
        await inbox.failed(0, Failure(0, "old", peer_lost=False))
        await inbox.register(0, 0, {})
        assert await inbox.last_words() == [] and await inbox.present() == []
        assert (await inbox.next(0, 2)).kind == "stop"
        await inbox.failed(1, Failure(0, "new", peer_lost=True))
        assert await inbox.all_present(1) is None and await inbox.call(1, 0, Command("train")) is None

    asyncio.run(asyncio.wait_for(scenario(), timeout=10))


def test_a_model_folder_that_lacks_or_reshapes_a_parameter_is_refused(model_path, tmp_path):
    weights = load_file(Path(model_path) / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(model_path) / "config.json").read_text())
    lost = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing keys in its weights, first model\.norm\.weight"):
        load_model(str(tmp_path), make_settings())
    save_file(
        weights | {"model.norm.weight": lost[:5].clone()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"1 mismatched keys in its weights, first \('model.norm.weight'"):
        load_model(str(tmp_path), make_settings())


def test_random_states_come_back_from_a_file(tmp_path):
    seed_everything(3)
    torch.save(random_states("cpu"), tmp_path / "states.pt")
    first = torch.rand(3).tolist(), np.random.rand(3).tolist()
    seed_everything(4)
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == first
