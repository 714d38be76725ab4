"""Hand-made packed blocks, a target and its features, for the tests of feature extraction; a plugin of pytest.

PYTEST_DONT_REWRITE, as tests import it before pytest does.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_target
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from configuration_peagle import tokenizer_fingerprint
from data.extract_features import extract_features
from data.sequence_packing import BLOCKS, template_hash


LONGEST, LAYERS = 24, [1, 2, 3]
TOKEN_BYTES = 4 * 32 * 4 + 9  # float32, four states of width 32
FLOAT32 = {"dtype": "float32", "progress": False, "shard_size": 3 * LONGEST * TOKEN_BYTES}


def make_tokenizer(extra="<unused>"):
    vocab = {f"token{i}": i for i in range(100)} | {extra: 100}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="token0")))
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


def write_blocks(folder, counts, seed=0):
    """A folder as `data.sequence_packing` lays it out, with so many blocks per split, each of two or three documents."""
    generator, manifest = torch.Generator().manual_seed(seed), {"max_seq_len": LONGEST, "tokenizer": "tiny"}
    (folder / "data").mkdir(parents=True)
    for split, count in counts.items():
        rows = []
        for number in range(count):
            lengths = [[9, 15], [5, 8, 10], [11, 13]][number % 3]
            ids = torch.randint(3, 95, (sum(lengths),), generator=generator).tolist()
            mask = [int(position >= 3) for length in lengths for position in range(length)]
            rows.append({"input_ids": ids, "loss_mask": mask, "seq_lengths": lengths})
        if rows:
            Dataset.from_list(rows, BLOCKS).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
        tokens, supervised = (sum(sum(row[name]) for row in rows) for name in ("seq_lengths", "loss_mask"))
        manifest[split] = {"shards": min(count, 1), "blocks": count, "tokens": tokens, "supervised": supervised}
    hashes = {"tokenizer_hash": tokenizer_fingerprint, "chat_template_hash": template_hash}
    manifest |= {name: of(make_tokenizer()) for name, of in hashes.items()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory):
    """datasets keeps its copies of the blocks outside the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="session")
def blocks(tmp_path_factory, own_cache):
    return write_blocks(tmp_path_factory.mktemp("blocks") / "blocks", {"train": 10, "eval": 2})


@pytest.fixture(scope="session")
def target_llama():
    return make_target("llama")


@pytest.fixture(scope="session")
def features(target_llama, blocks, tmp_path_factory):
    """Float32 features of all blocks; to be read only."""
    output = tmp_path_factory.mktemp("features") / "features"
    extract_features(target_llama, make_tokenizer(), blocks, output, layer_ids=LAYERS, **FLOAT32)
    return output


def contents(folder):
    return {path.name: load_file(path) for path in sorted(Path(folder).glob("*.safetensors"))}


def assert_same(one, other):
    one, other = contents(one), contents(other)
    assert one.keys() == other.keys() and len(one) > 0
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)
