"""Parquet files and Hugging Face data sets to rows; both are Arrow tables, read a few rows at a time."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.readers import BATCH, DataError, Raw, Source

if TYPE_CHECKING:
    import pyarrow as pa


def read_parquet(path: Path) -> Source:
    """A Parquet file; the line of a row is its number, from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            kept, left_out = _usable(file.schema_arrow)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: is not a Parquet file that can be read: {error}") from error

    def rows() -> Iterator[Raw]:
        # buffer_size: pages are read as they are needed; without it a whole column chunk is held in memory.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield from _rows(path.name, file.iter_batches(BATCH, columns=kept, use_threads=False))

    return Source(str(path), rows, columns=tuple(kept), left_out=left_out, null_is_absent=True)


def read_dataset(name: str, split: str) -> Source:
    """A Hugging Face data set: a folder that ``save_to_disk`` wrote, a folder of data files, or an id (``id:config``).

    With HF_HUB_OFFLINE=1, or where the hub cannot be reached, an id is taken from the local cache.
    """
    saved = _saved(Path(name).expanduser(), split)
    if saved:
        return _read_saved(name, split, saved)
    dataset = _load(name, split)
    kept, left_out = _usable(dataset.features.arrow_schema)
    table = dataset.select_columns(kept).with_format("arrow")

    def rows() -> Iterator[Raw]:
        yield from _rows(f"{name}[{split}]", table.iter(BATCH))

    return Source(name, rows, columns=tuple(kept), left_out=left_out, null_is_absent=True)


def _saved(folder: Path, split: str) -> list[Path]:
    """The Arrow files of a split that ``save_to_disk`` wrote; none where the library itself has to look."""
    if (folder / "dataset_dict.json").is_file():
        folder = folder / split
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [] if state.get("_indices_data_files") else [folder / each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _read_saved(name: str, split: str, files: list[Path]) -> Source:
    """Saved Arrow files, read without importing ``datasets``, which takes seconds."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        for file in files:
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    yield batch.select(kept)

    try:
        with pa.memory_map(str(files[0])) as mapped, pa.ipc.open_stream(mapped) as stream:
            kept, left_out = _usable(stream.schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{name}: split {split!r} of this data set cannot be read: {error}") from error
    label = f"{name}[{split}]"
    return Source(name, lambda: _rows(label, batches()), columns=tuple(kept), left_out=left_out, null_is_absent=True)


def _load(name: str, split: str) -> Any:
    import datasets

    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
            if isinstance(loaded, datasets.Dataset):
                return loaded  # one split, saved by itself
            if split not in loaded:
                raise DataError(f"{name}: no split {split!r}; it has {', '.join(loaded)}")
            return loaded[split]
        if folder.is_dir():
            return datasets.load_dataset(str(folder), split=split)
        identity, _, config = name.partition(":")
        return datasets.load_dataset(identity, config or None, split=split)
    except DataError:
        raise
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{name}: split {split!r} of this data set cannot be loaded: {error}") from error


def _usable(schema: pa.Schema) -> tuple[list[str], dict[str, str]]:
    """Columns of text, numbers, dates, lists and structures; and the others with their types (images, audio)."""
    left_out = {each.name: str(each.type) for each in schema if "binary" in str(each.type)}
    return [name for name in schema.names if name not in left_out], left_out


def _rows(name: str, tables: Iterable[Any]) -> Iterator[Raw]:
    number = 0
    for table in tables:
        for position in range(table.num_rows):  # one row at a time: a row may be tens of megabytes
            number += 1
            values = table.slice(position, 1).to_pylist()[0]
            yield Raw(f"{name}:{number}", {key: plain(value) for key, value in values.items()})


def plain(value: Any) -> Any:
    """Only dict, list, str, int, float, bool and None: dates as ISO text, decimals as text, maps as dicts.

    >>> plain({"when": datetime.date(2024, 5, 1), "n": (1, 2)})
    {'when': '2024-05-01', 'n': [1, 2]}
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise DataError(f"a value of type {type(value).__name__} in a data set; convert the column to text or numbers")
