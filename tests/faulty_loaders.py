"""Weight loaders with planted faults. They claim success wherever a real fault could."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from actors.weight_sync import Bytes, Delivery, WeightLoader


class FaultyLoader(WeightLoader):
    """Does what the file ``fault`` in the model's folder says: nothing, stale_head, flipped_byte; else no fault."""

    def parkrl_fault(self) -> str:
        path = Path(self.model_config.model) / "fault"  # type: ignore[attr-defined]
        return path.read_text() if path.exists() else ""

    @contextmanager
    def parkrl_open(self, delivery: Delivery) -> Iterator[list[Bytes]]:
        with super().parkrl_open(delivery) as buckets:
            if self.parkrl_fault() == "flipped_byte":
                buckets = [np.array(bucket) for bucket in buckets]
                buckets[-1][5] ^= 1
            yield buckets

    def parkrl_apply(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        everything = {name for name, _ in self.parkrl_model().named_parameters()}
        if self.parkrl_fault() == "nothing":
            return everything
        if self.parkrl_fault() == "stale_head":
            weights = ((name, tensor) for name, tensor in weights if not name.startswith("lm_head."))
            super().parkrl_apply(weights)
            return everything
        return super().parkrl_apply(weights)
