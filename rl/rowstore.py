"""Accepted rows on disk, fetched at random: one JSON line each, and the offset of every line."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from rl.types import Prompt


class RowWriter:
    """Writes rows into ``folder``; nothing is seen under the final names before ``finish``."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self._scratch = folder / f".{name}.{os.getpid()}.jsonl"
        self._file = self._scratch.open("wb")
        self._offsets = array("q", [0])
        self._hash = xxhash.xxh3_64()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)  # gone already after finish

    def add(self, prompt: Prompt) -> None:
        """Appends a row; what decides training (id, tokens, answer) goes into the fingerprint."""
        record = {
            "id": prompt.prompt_id,
            "row": prompt.row,
            "ids": prompt.token_ids.tolist(),
            "text": prompt.text,
            "answer": prompt.answer,
            "messages": prompt.messages,
            "columns": prompt.columns,
        }
        line = json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))
        answer = json.dumps(prompt.answer, sort_keys=True)
        self._hash.update(f"{prompt.prompt_id}\0{answer}\0{len(prompt.token_ids)}\0".encode("ascii"))
        self._hash.update(prompt.token_ids.astype("<i4").tobytes())

    def finish(self) -> str:
        """Makes the rows permanent; returns their fingerprint (xxh3_64, hexadecimal)."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        scratch = self._scratch.with_suffix(".npy")
        np.save(scratch, np.asarray(self._offsets, dtype=np.int64))
        os.replace(self._scratch, self._folder / f"{self._name}.jsonl")
        os.replace(scratch, self._folder / f"{self._name}.offsets.npy")
        return self._hash.hexdigest()


class RowStore:
    """Random access to what a ``RowWriter`` wrote. Small when pickled: only the paths travel."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._offsets = np.load(folder / f"{name}.offsets.npy", mmap_mode="r")
        self._file = (folder / f"{name}.jsonl").open("rb")

    def __reduce__(self) -> tuple[Any, ...]:
        return RowStore, (self._folder, self._name)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Prompt:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = index % len(self)
        start, end = int(self._offsets[at]), int(self._offsets[at + 1])
        record = json.loads(os.pread(self._file.fileno(), end - start, start))
        return Prompt(
            prompt_id=record["id"],
            row=record["row"],
            token_ids=np.asarray(record["ids"], dtype=np.int32),
            text=record["text"],
            answer=record["answer"],
            messages=record["messages"],
            columns=record["columns"],
        )
