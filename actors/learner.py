"""One rank of the learner: what runs inside a worker of Ray Train's TorchTrainer.

It owns the weights, the optimizer and the learning rate. It asks the inbox for commands (train, publish, save, stop)
until it is told to stop. All ranks hold the same weights; only their micro-batches differ.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import traceback
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import ray.train
import torch
import torch.distributed
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.inbox import Command, Failure
from actors.weight_sync import probe_ids, publish
from rl.config import Settings
from rl.device import DEVICES
from rl.flat import FlatParameters
from rl.optim import load_optimizer_state, make_optimizer, optimizer_state
from rl.train_step import Trainer, one_rank, train_step
from rl.types import Probe, WeightUpdate

TRAINER_FOLDER = "trainer"  # apart from the model's files: whoever loads a folder takes every *.safetensors in it
TRAINER_FILE = f"{TRAINER_FOLDER}/trainer.json"
OPTIMIZER_FILE = f"{TRAINER_FOLDER}/optimizer.safetensors"
MODEL_FILE = "model.safetensors"


class PeerLostError(RuntimeError):
    """A collective operation failed: another rank is gone or hangs."""


def run_rank(config: dict[str, Any]) -> None:
    """The train function: ``config`` holds settings, inbox, attempt, model_path, checkpoint, total_updates."""
    inbox, attempt = config["inbox"], config["attempt"]
    rank = ray.train.get_context().get_world_rank()
    transformers.utils.logging.disable_progress_bar()
    try:
        learner = LearnerRank(
            config["settings"], config["model_path"], config["checkpoint"], config["total_updates"], rank
        )
        ray.get(inbox.register.remote(attempt, rank, learner.describe()))
        sequence = 0
        while True:
            command: Command = ray.get(inbox.next.remote(attempt, sequence))
            answer = learner.obey(command)
            ray.get(inbox.done.remote(attempt, rank, sequence, answer))
            if command.kind == "stop":
                return
            del answer  # it may hold the only references to published weights
            sequence += 1
    except Exception as error:
        words = "".join(traceback.format_exception(error)[-8:])
        ray.get(inbox.failed.remote(attempt, Failure(rank, words, isinstance(error, PeerLostError))))
        raise


def all_reduce(tensor: Tensor, operation: Literal["sum", "max"]) -> None:
    """In place, over all ranks. Raises PeerLostError."""
    op = torch.distributed.ReduceOp.SUM if operation == "sum" else torch.distributed.ReduceOp.MAX
    try:
        torch.distributed.all_reduce(tensor, op=op)
    except RuntimeError as error:
        raise PeerLostError(f"all_reduce failed: {error}") from error


def load_model(path: str, settings: Settings) -> transformers.PreTrainedModel:
    """A causal language model in float32. Raises ValueError when the files lack, add or reshape a parameter."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        trust_remote_code=settings.model.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that they are reported here, by name
    )
    model, info = loaded  # a pair because of output_loading_info
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(problem) or ())
        if names:
            raise ValueError(f"{path}: {len(names)} {problem.replace('_', ' ')} in its weights, first {names[0]}")
    return model


class LearnerRank:
    """Model, optimizer and random states of one rank.

    ``checkpoint`` is a folder that ``save`` filled, or None to start from the model at ``model_path``. Raises
    ValueError when the checkpoint does not fit the model or another number of ranks wrote it.
    """

    def __init__(
        self, settings: Settings, model_path: str, checkpoint: str | None, total_updates: int, rank: int
    ) -> None:
        torch.set_num_threads(settings.learner.threads)
        self.settings, self.model_path, self.rank = settings, model_path, rank
        self.world_size = ray.train.get_context().get_world_size()
        self.device = DEVICES[settings.learner.device]
        seed_everything(settings.run.seed + rank)
        model = load_model(checkpoint or model_path, settings)
        self.torch_device = self.device.torch_device(ray.train.get_context().get_local_rank())
        model.to(self.torch_device)  # type: ignore[arg-type]
        model.train()
        flat = FlatParameters(model)
        self.parameters = dict(model.named_parameters())
        self.trainer = Trainer(
            model=model,
            flat=flat,
            optimizer=make_optimizer(self.parameters, settings.learner),
            settings=settings,
            device=self.device,
            total_updates=total_updates,
            all_reduce=all_reduce if self.world_size > 1 else one_rank,
        )
        vocabulary = model.config.get_text_config().vocab_size
        self.probe_ids = probe_ids(vocabulary, settings.sync.probe_tokens, settings.run.seed)
        self.version = -1
        if checkpoint is not None:
            self._load(Path(checkpoint))

    def describe(self) -> dict[str, Any]:
        """Where this rank runs, as it sees itself."""
        context = ray.get_runtime_context()
        node: dict[str, Any] = next((n for n in ray.nodes() if n["NodeID"] == context.get_node_id()), {})
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "device": str(self.torch_device),
            "chip": os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("CUDA_VISIBLE_DEVICES"),
            "slice": node.get("Labels", {}).get("ray.io/tpu-slice-name"),
        }

    def obey(self, command: Command) -> Any:
        """Does what is asked and returns the answer."""
        if command.kind == "train":
            return self._train(**command.arguments)
        if command.kind == "publish":
            return self._publish(**command.arguments)
        if command.kind == "save":
            return self._save(**command.arguments)
        return None

    def _train(self, batches: list[ray.ObjectRef], publish: int | None) -> tuple[dict[str, float], WeightUpdate | None]:
        """Metrics, and the new weights as version ``publish`` where one is given."""
        metrics = train_step(self.trainer, ray.get(batches[self.rank]))
        self.device.synchronise()
        return metrics, None if publish is None else self._publish(publish)

    def _publish(self, version: int) -> WeightUpdate | None:
        """Rank 0 hands out the weights with the proof that goes with them; all ranks hold the same ones."""
        self.version = version
        if self.rank != 0:
            return None
        probe = Probe(token_ids=self.probe_ids, logprobs=self._probe(self.probe_ids))
        return publish(self.trainer.flat, version, probe, self.settings.sync.bucket_mb)

    def _probe(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-probabilities, at temperature 1 and in float32, of each token but the first."""
        model = self.trainer.model
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.torch_device)
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        model.train()
        return logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).cpu().numpy()

    def _save(self, folder: str) -> None:
        """Rank 0 writes a Hugging Face folder and the optimizer beside it; every rank its own random states."""
        path = Path(folder)
        (path / TRAINER_FOLDER).mkdir(exist_ok=True)
        if self.rank == 0:
            self._save_model(path)
            save_file(optimizer_state(self.trainer.optimizer, self.parameters), path / OPTIMIZER_FILE)
            state = {"updates": self.trainer.updates, "version": self.version, "world_size": self.world_size}
            (path / TRAINER_FILE).write_text(json.dumps(state))
        torch.save(random_states(self.settings.learner.device), path / TRAINER_FOLDER / f"rank_{self.rank}.pt")

    def _save_model(self, path: Path) -> None:
        model = self.trainer.model
        assert isinstance(model, transformers.PreTrainedModel)
        # Views into one storage look like tied weights to safetensors, so each is copied; really tied ones stay one.
        copies: dict[int, Tensor] = {}
        state = {}
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = tensor.detach().cpu().clone()
            state[name] = copies[tensor.data_ptr()]
        model.save_pretrained(path, state_dict=state, max_shard_size="1TB")
        if not (path / MODEL_FILE).is_file():
            raise RuntimeError(f"the model was not written as {path / MODEL_FILE}")
        copy_tokenizer(self.model_path, path)

    def _load(self, path: Path) -> None:
        """Optimizer and counters (the weights are loaded already) and this rank's random states."""
        state = json.loads((path / TRAINER_FILE).read_text())
        if state["world_size"] != self.world_size:
            raise ValueError(
                f"learner.workers={self.world_size}, but {path} was written by {state['world_size']} workers; "
                f"set learner.workers: {state['world_size']}"
            )
        self.trainer.updates, self.version = int(state["updates"]), int(state["version"])
        moments = load_file(path / OPTIMIZER_FILE)
        load_optimizer_state(self.trainer.optimizer, self.parameters, moments, self.trainer.updates)
        set_random_states(torch.load(path / TRAINER_FOLDER / f"rank_{self.rank}.pt", weights_only=True))


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's own generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states(device: str) -> dict[str, Any]:
    """The states of the same generators, in types that ``torch.load(weights_only=True)`` takes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def set_random_states(states: dict[str, Any]) -> None:
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def copy_tokenizer(model_path: str, folder: Path) -> None:
    """Copies what belongs to the model besides weights and configuration (tokenizer, chat template, code)."""
    source = Path(model_path)
    if not source.is_dir():
        transformers.AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)
        return
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or ".index.json" in file.name
        if file.is_file() and not weights and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
