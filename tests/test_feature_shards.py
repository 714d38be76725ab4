"""Feature shards: whole after kills, full disks and damage, refused where they do not fit, and read block by block."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SIZES, make_target
from feature_helpers import FLOAT32, LAYERS, LONGEST, TOKEN_BYTES, assert_same, contents, make_tokenizer, write_blocks
from filelock import FileLock
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from data.extract_features import extract_features
from data.extract_features import main as extract_main
from data.feature_shards import FeatureShards, ShardShuffle


pytest_plugins = "feature_helpers"

# ---- interruptions --------------------------------------------------------------------------------------------------


def written(folder):
    """When each shard was written, in ns."""
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).glob("*.safetensors")}


@pytest.fixture(scope="session")
def target_folder(target_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target_llama.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def arguments(target_folder, source, output, **changes):
    """Of the command, for float32 features in small shards."""
    options = {"model_path": target_folder, "input": source, "output": output, "dtype": "float32"}
    options |= {"shard_size": FLOAT32["shard_size"], "layer_ids": LAYERS} | changes
    pairs = ([f"--{name}", *(value if isinstance(value, list) else [value])] for name, value in options.items())
    return [str(part) for pair in pairs for part in pair]


def test_a_killed_run_is_completed_by_the_same_command(target_folder, target_llama, own_cache, tmp_path):
    source, output = write_blocks(tmp_path / "blocks", {"train": 400, "eval": 3}), tmp_path / "out"
    one_each = arguments(target_folder, source, output, shard_size=LONGEST * TOKEN_BYTES)
    # A process of its own, not a fork: other tests leave threads behind, whose locks a fork would inherit.
    run = subprocess.Popen(
        [sys.executable, "-m", "data.extract_features", *one_each], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while run.poll() is None and len(written(output)) < 3:
        time.sleep(0.001)
    run.kill()
    run.wait()
    kept = written(output)
    assert run.returncode == -9 and 3 <= len(kept) < 403, "it was done before it was killed"
    with pytest.raises(ValueError, match="not finished"):
        FeatureShards(output)
    extract_main(one_each)
    assert kept.items() <= written(output).items()
    assert not any((output / ".partial").iterdir()) and len(FeatureShards(output)) == 400
    extract_features(
        target_llama,
        make_tokenizer(),
        source,
        tmp_path / "whole",
        **FLOAT32 | {"layer_ids": LAYERS, "shard_size": 10**7},
    )
    for index in (0, 7, 399):
        one, other = FeatureShards(output)[index], FeatureShards(tmp_path / "whole")[index]
        torch.testing.assert_close(one["features"], other["features"], atol=0, rtol=0)
        assert torch.equal(one["input_ids"], other["input_ids"])


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 100),
    "emptied": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "another shard's": lambda path: shutil.copy(path.with_name("train-00002-of-00004.safetensors"), path),
    "one bit flipped": lambda path: path.write_bytes(
        path.read_bytes()[:-5] + bytes([path.read_bytes()[-5] ^ 1]) + path.read_bytes()[-4:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("complete", [True, False])
def test_a_damaged_shard_alone_is_made_anew(damage, complete, target_llama, blocks, features, tmp_path):
    output = shutil.copytree(features, tmp_path / "out")
    bad = output / "train-00001-of-00004.safetensors"
    if not complete:
        manifest = json.loads((output / "manifest.json").read_text())
        (output / "manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    before = written(output)
    DAMAGE[damage](bad)
    extract_features(target_llama, make_tokenizer(), blocks, output, layer_ids=LAYERS, **FLOAT32)
    assert_same(output, features)
    assert [name for name, then in before.items() if written(output)[name] != then] == [bad.name]
    assert len(FeatureShards(output)) == 10


def test_a_full_disk_stops_the_run_and_the_next_completes_it(target_llama, blocks, features, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = FLOAT32 | {"layer_ids": LAYERS}
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # the last shard of train and eval's are smaller
    try:
        with pytest.raises(OSError, match="could not be written.*(File too large|space).*run python -m"):
            extract_features(target_llama, make_tokenizer(), blocks, tmp_path / "out", **big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not contents(tmp_path / "out")
    extract_features(target_llama, make_tokenizer(), blocks, tmp_path / "out", **big)
    assert_same(tmp_path / "out", features)


def test_another_setting_is_refused_by_its_name_and_nothing_is_touched(target_llama, blocks, features, tmp_path):
    output = shutil.copytree(features, tmp_path / "out")
    os.truncate(output / "eval-00000-of-00001.safetensors", 1000)
    base = {"target": target_llama, "blocks": blocks, "layer_ids": LAYERS, **FLOAT32}
    others = {
        "layer_ids": {"layer_ids": [0, 1, 2]},
        "dtype": {"dtype": "bfloat16", "shard_size": 3 * LONGEST * 265},
        "blocks_per_shard": {"shard_size": 4 * LONGEST * TOKEN_BYTES},
        "target_weights": {"target": make_target("llama", seed=1)},
        "blocks_hash": {"blocks": write_blocks(tmp_path / "blocks", {"train": 9, "eval": 1})},
        "revision": {"revision": "v2"},
    }
    for key, other in others.items():
        options = base | other
        with pytest.raises(ValueError, match=rf"other settings: {key} \S.* there and [^;]*$"):
            extract_features(options.pop("target"), make_tokenizer(), options.pop("blocks"), output, **options)
    assert (output / "eval-00000-of-00001.safetensors").stat().st_size == 1000


def test_a_folder_of_something_else_is_left_alone(target_llama, blocks, tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(FileExistsError, match="holds other files"):
        extract_features(target_llama, make_tokenizer(), blocks, tmp_path, **FLOAT32)
    with pytest.raises(ValueError, match="not a manifest of feature shards"):
        extract_features(target_llama, make_tokenizer(), blocks, blocks, **FLOAT32)


def test_two_runs_do_not_write_to_one_folder(target_llama, blocks, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(FileExistsError, match="another run writes"):
        extract_features(target_llama, make_tokenizer(), blocks, tmp_path / "out", **FLOAT32)
    extract_features(
        target_llama, make_tokenizer(), blocks, tmp_path / "out", **FLOAT32
    )  # the lock went with its owner


def test_two_processes_make_the_same_shards_as_one(target_folder, blocks, features, tmp_path):
    def launch(output, **changes):
        line = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--module",
            "data.extract_features",
        ]
        line += arguments(target_folder, blocks, output, **changes)
        return subprocess.run(
            line, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    run = launch(tmp_path / "out")
    assert run.returncode == 0 and "in each of 2 process(es)" in run.stdout, run.stderr
    assert_same(tmp_path / "out", features)
    assert FeatureShards(tmp_path / "out").manifests[tmp_path / "out"]["complete"]
    run = launch(tmp_path / "refused", max_disk=1000)  # by both, or one would wait for the other for ever
    assert run.returncode != 0 and "--max_disk" in run.stderr


# ---- reading --------------------------------------------------------------------------------------------------------


def test_missing_and_damaged_shards_are_named(features, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no manifest.json"):
        FeatureShards(tmp_path)
    output = shutil.copytree(features, tmp_path / "out")
    dataset, last = FeatureShards(output), output / "train-00003-of-00004.safetensors"
    os.truncate(last, 1000)
    with pytest.raises(ValueError, match=rf"{last.name} has 1,000 bytes instead of .* again"):
        FeatureShards(output)
    with pytest.raises(ValueError, match=f"{last.name} is damaged"):
        dataset[9]
    flipped = bytearray((features / last.name).read_bytes())
    flipped[-100] ^= 1
    last.write_bytes(flipped)
    with pytest.raises(ValueError, match=f"{last.name} is damaged"):
        FeatureShards(output)[9]
    last.unlink()
    for read in (lambda: FeatureShards(output), lambda: dataset[9]):
        with pytest.raises(FileNotFoundError, match=f"{last.name} is missing"):
            read()
    with pytest.raises(IndexError):
        dataset[10]


def test_check_names_what_differs(target_llama, features):
    dataset = FeatureShards(features)
    dataset.check(target_llama, make_tokenizer(), LAYERS)
    shallow = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3))
    templated = make_tokenizer()
    templated.chat_template = "X{{ messages }}"
    for key, args in {
        "layer_ids": (target_llama, make_tokenizer(), [0, 1, 2]),
        "tokenizer_hash": (target_llama, make_tokenizer("<other>"), LAYERS),
        "chat_template_hash": (target_llama, templated, LAYERS),
        "target_weights": (make_target("llama", seed=1), make_tokenizer(), LAYERS),
        "num_hidden_layers": (shallow, make_tokenizer(), LAYERS),
    }.items():
        with pytest.raises(ValueError, match=rf"not of this target: {key} \S.* there and "):
            dataset.check(*args)


def opened(dataset, order):
    """How often a shard is opened when blocks are read in an order."""
    count, known = 0, set()
    for index in order:
        dataset[index]
        count += len(dataset._open.keys() - known)
        known = set(dataset._open)
        assert len(known) <= dataset.cache_size
    return count


def test_the_shuffled_order_opens_each_shard_once(features):
    dataset = FeatureShards(features, cache_size=2)
    sampler = ShardShuffle(dataset, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(10)) and len(sampler) == 10 and first == list(sampler)
    assert opened(dataset, first) == 4
    plain = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    assert opened(FeatureShards(features, cache_size=2), plain) > 4
    sampler.set_epoch(1)
    assert list(sampler) != first and sorted(sampler) == list(range(10))


def test_several_folders_are_read_one_after_the_other(features, target_llama, tmp_path):
    source = write_blocks(tmp_path / "blocks", {"train": 3, "eval": 0})
    other = tmp_path / "other"
    extract_features(target_llama, make_tokenizer(), source, other, layer_ids=LAYERS, **FLOAT32)
    both, apart = FeatureShards(features, other), [*FeatureShards(features), *FeatureShards(other)]
    assert len(both) == 13 == len(apart)
    for index, block in enumerate(apart):  # the last shard of the first folder is shorter than the others
        assert torch.equal(both[index]["features"], block["features"])
        assert torch.equal(both[index]["input_ids"], block["input_ids"])
    for text, block in zip(both.texts(), apart, strict=True):
        assert torch.equal(text["input_ids"], block["input_ids"]) and text["seq_lengths"] == block["seq_lengths"]
    fresh = FeatureShards(features, other, cache_size=2)
    order = list(ShardShuffle(fresh, seed=3))
    assert sorted(order) == list(range(13)) and opened(fresh, order) == len(fresh.paths) == 5
    assert len(FeatureShards(features, other, split="eval")) == len(FeatureShards(features, split="eval"))
    both.check(target_llama, make_tokenizer(), LAYERS)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"layer_ids": [0, 1, 2]}))
    with pytest.raises(ValueError, match=f"the features in {other} are .* layer_ids .0, 1, 2. there and"):
        FeatureShards(features, other).check(target_llama, make_tokenizer(), LAYERS)


def test_workers_and_an_empty_split_read_too(features, target_llama, tmp_path):
    loader = torch.utils.data.DataLoader(FeatureShards(features), batch_size=None, num_workers=1)
    for block, again in zip(loader, FeatureShards(features), strict=True):
        assert torch.equal(block["features"], again["features"])
    source = write_blocks(tmp_path / "blocks", {"train": 2, "eval": 0})
    extract_features(target_llama, make_tokenizer(), source, tmp_path / "out", **FLOAT32)
    assert list(ShardShuffle(FeatureShards(tmp_path / "out", split="eval"))) == []


def test_a_block_is_read_without_the_rest_of_its_shard(features):
    with safe_open(features / "train-00000-of-00004.safetensors", "pt") as shard:
        offsets = shard.get_tensor("block_offsets").tolist()
        part = shard.get_slice("features")[offsets[1] : offsets[2]]
        assert torch.equal(part, FeatureShards(features)[1]["features"])
