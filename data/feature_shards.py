"""Feature shards, what the target said about packed blocks: their format, writing them safely, and reading them to train.

A folder holds ``manifest.json`` and, per split, safetensors files ``train-00000-of-00012.safetensors``, ``eval-...``. Every
shard but the last of a split holds the same number of blocks, one after the other:

| tensor | shape | dtype |
|---|---|---|
| ``features`` | (tokens, layers * hidden_size) | the manifest's |
| ``last_hidden`` | (tokens, hidden_size) | the manifest's |
| ``input_ids``, ``position_ids`` | (tokens,) | int32 |
| ``loss_mask`` | (tokens,) | int8 |
| ``cu_seqlens`` | (documents + 1,) | int32, first token of each document, then the number of tokens |
| ``block_offsets`` | (blocks + 1,) | int32, the same of each block |
"""

import hashlib
import json
import os
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset, Sampler

from configuration_peagle import tokenizer_fingerprint
from data.sequence_packing import template_hash
from data.target_signals import weights_fingerprint


FORMAT = 1
MANIFEST = "manifest.json"
NOTES = "peagle"  # the key of the header's metadata, JSON
# Files are written here and then moved, because a killed safetensors leaves temporary files of random names behind.
PARTIAL = ".partial"
AGAIN = "run python -m data.extract_features again with the same flags: it keeps what is whole and redoes the rest"


def shard_names(split: str, shards: int) -> list[str]:
    return [f"{split}-{index:05}-of-{shards:05}.safetensors" for index in range(shards)]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the bytes of contiguous CPU tensors, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].view(torch.uint8).numpy())
    return total.hexdigest()


def _move(written: Path, path: Path) -> None:
    """Give a file its final name, once its bytes are on the disk."""
    for place, change in ((written, lambda: os.replace(written, path)), (path.parent, lambda: None)):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        change()


def write_shard(path: Path, tensors: dict[str, torch.Tensor], notes: dict) -> None:
    """Write a shard and, into its header, ``notes`` and the digest of its tensors; ``path`` is whole or not there.

    Raises OSError where it could not be written, for want of space for example.
    """
    written = path.parent / PARTIAL / path.name
    written.touch()
    mode = written.stat().st_mode  # as files are made here; safetensors' own are their user's alone
    try:
        # One entry, as safetensors writes several in random order: equal shards shall be equal files.
        save_file(tensors, written, {NOTES: json.dumps(notes | {"sha256": digest(tensors)})})
    except SafetensorError as error:  # of the operating system's errors too
        raise OSError(f"{path} could not be written: {error}. Make room, then {AGAIN}") from error
    written.chmod(mode)
    _move(written, path)


def write_manifest(folder: Path, manifest: dict) -> None:
    written = folder / PARTIAL / MANIFEST
    written.write_text(json.dumps(manifest, indent=2) + "\n")
    _move(written, folder / MANIFEST)


def read_manifest(folder: Path) -> dict:
    """Raises FileNotFoundError where there is none, ValueError where it is not a manifest of feature shards."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: make the features with python -m data.extract_features")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if {"format", "layer_ids", "complete"} <= manifest.keys():
            return manifest
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{folder / MANIFEST} is not a manifest of feature shards: name another folder")


def inspect_shard(path: Path, expected: dict, whole: bool = True) -> dict | None:
    """The notes in the header if the shard is there, undamaged and with the ``expected`` ones among them; else None.

    ``whole``: compare the digest of its tensors too, which reads all of it.
    """
    try:
        with safe_open(path, "pt") as shard:  # compares the file's size with its header
            notes = json.loads(shard.metadata()[NOTES])
            if any(notes[key] != value for key, value in expected.items()):
                return None
            if whole and digest({name: shard.get_tensor(name) for name in shard.keys()}) != notes["sha256"]:
                return None
            return notes
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):  # absent, cut short or not ours
        return None


def load_manifest(folder: Path, split: str) -> dict:
    """The manifest of a folder whose extraction is finished and whose shards of ``split`` are there, whole by their sizes.

    Raises the errors that [`FeatureShards`] names.
    """
    manifest = read_manifest(folder)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{folder} has format {manifest['format']}, this code reads {FORMAT}: extract the features anew"
        )
    if not manifest["complete"]:
        raise ValueError(f"the extraction to {folder} is not finished: {AGAIN}")
    for name in shard_names(split, manifest[split]["shards"]):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: {AGAIN}")
        size, right = (folder / name).stat().st_size, manifest["files"][name]["bytes"]
        if size != right:
            raise ValueError(f"{folder / name} has {size:,} bytes instead of {right:,}: {AGAIN}")
    return manifest


class FeatureShards(Dataset):
    """The blocks of one split with the target's signals, by index; read from the disk as they are asked for.

    Item ``i`` is a dict of ``input_ids`` (tokens,) int32, ``loss_mask`` (tokens,) int8, ``seq_lengths`` (list of int, one
    per document), ``features`` (tokens, layers * hidden_size) and ``last_hidden`` (tokens, hidden_size) in the manifest's
    dtype. ``len`` is the number of blocks.

    Args:
        *folders: Outputs of `python -m data.extract_features`, whose blocks follow one another.
        split: "train" or "eval".
        cache_size: Shards held open, the ones used last. [`ShardShuffle`] gives an order that opens each once an epoch.

    Raises:
        FileNotFoundError: A manifest or a shard is missing.
        ValueError: The extraction is not finished, the format is another one, or a shard is cut short or damaged.
    """

    def __init__(self, *folders, split: str = "train", cache_size: int = 4):
        self.cache_size = cache_size
        if split not in ("train", "eval") or cache_size < 1:
            raise ValueError(f"need split train or eval and cache_size >= 1, got {split!r} and {cache_size}")
        self.manifests = {Path(folder): load_manifest(Path(folder), split) for folder in folders}
        self.paths, self.starts = [], [0]  # of every shard, and of its first block; the last is the number of blocks
        for folder, manifest in self.manifests.items():
            most, left = manifest["blocks_per_shard"], manifest[split]["blocks"]
            for name in shard_names(split, manifest[split]["shards"]):
                self.paths.append(folder / name)
                self.starts.append(self.starts[-1] + min(most, left))
                left -= most
        self._open, self._whole = OrderedDict(), set()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        number = bisect(self.starts, index % len(self)) - 1
        within = index % len(self) - self.starts[number]
        shard, cu_seqlens, block_offsets = self._shard(number)
        # Once, and only for the signals, as it reads all of the shard: what is learned is what was written.
        if number not in self._whole and inspect_shard(self.paths[number], {}) is None:
            raise ValueError(f"{self.paths[number]} is damaged: {AGAIN}")
        self._whole.add(number)
        first, end = block_offsets[within : within + 2].tolist()
        block = {
            name: shard.get_slice(name)[first:end] for name in ("input_ids", "loss_mask", "features", "last_hidden")
        }
        inside = (cu_seqlens >= first) & (cu_seqlens <= end)
        return block | {"seq_lengths": cu_seqlens[inside].diff().tolist()}

    def texts(self) -> Iterator[dict]:
        """The blocks in their order, without the target's signals: ``input_ids``, ``loss_mask`` and ``seq_lengths``."""
        for number in range(len(self.paths)):
            shard, cu_seqlens, block_offsets = self._shard(number)
            ids, mask = shard.get_tensor("input_ids"), shard.get_tensor("loss_mask")
            for first, end in block_offsets.unfold(0, 2, 1).tolist():
                inside = (cu_seqlens >= first) & (cu_seqlens <= end)
                lengths = cu_seqlens[inside].diff().tolist()
                yield {"input_ids": ids[first:end], "loss_mask": mask[first:end], "seq_lengths": lengths}

    def _shard(self, number: int) -> tuple:
        """Of an open shard the file, ``cu_seqlens`` and ``block_offsets``; the one used longest ago is closed for it."""
        if number not in self._open:
            path = self.paths[number]
            try:
                shard = safe_open(path, "pt")
                self._open[number] = shard, shard.get_tensor("cu_seqlens"), shard.get_tensor("block_offsets")
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{path} is missing: {AGAIN}") from error
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}): {AGAIN}") from error
        self._open.move_to_end(number)
        if len(self._open) > self.cache_size:
            self._open.popitem(last=False)
        return self._open[number]

    def __getstate__(self):
        return self.__dict__ | {"_open": OrderedDict()}  # open files cannot be sent to a worker: it opens its own

    def check(self, target, tokenizer, layer_ids: list[int]) -> None:
        """Refuse features that this target, tokenizer, chat template or choice of layers would not give.

        ``target``: the model, of whose weights a sample is compared; ``layer_ids``: those of the drafter's configuration.
        Raises ValueError naming what differs, with both values.
        """
        text = target.config.get_text_config()
        ours = {
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "layer_ids": list(layer_ids),
            "tokenizer_hash": tokenizer_fingerprint(tokenizer),
            "chat_template_hash": template_hash(tokenizer),
            "target_weights": weights_fingerprint(target),
        }
        for folder, theirs in self.manifests.items():
            differ = [f"{key} {theirs[key]} there and {ours[key]} here" for key in ours if theirs[key] != ours[key]]
            if differ:
                raise ValueError(
                    f"the features in {folder} are those of {theirs['target']}, not of this target: "
                    f"{'; '.join(differ)}. Extract them anew with this target, or load the one they were made with"
                )


class ShardShuffle(Sampler):
    """Every block once, in an order that needs no more shards open than the dataset keeps, another one in each epoch.

    Shards are shuffled and taken ``cache_size`` at a time, and the blocks of those are shuffled together. The order depends
    on the seed and the epoch alone.
    """

    def __init__(self, dataset: FeatureShards, seed: int = 0):
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        blocks = torch.arange(len(self.dataset)).tensor_split(self.dataset.starts[1:-1])
        shards = torch.randperm(len(self.dataset.paths), generator=generator).tolist()
        for first in range(0, len(shards), self.dataset.cache_size):
            together = torch.cat([blocks[shard] for shard in shards[first : first + self.dataset.cache_size]])
            yield from together[torch.randperm(len(together), generator=generator)].tolist()
