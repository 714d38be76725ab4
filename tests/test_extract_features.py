"""Extracted features: equal to what the target says of each document alone; sizes, refusals and the command."""

import json
import shutil
from argparse import ArgumentTypeError

import pytest
import torch
from conftest import TARGETS, make_drafter, make_target
from feature_helpers import FLOAT32, LAYERS, LONGEST, assert_same, contents, make_tokenizer
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from arguments_peagle import PEagleArguments
from data.collator import PackingCollator, packed_row
from data.extract_features import extract_features, main
from data.feature_plan import parse_size
from data.feature_shards import FeatureShards
from data.sequence_packing import load_blocks
from data.target_signals import check_isolation, target_signals
from trainer_peagle import PEagleTrainer, TargetSignals


pytest_plugins = "feature_helpers"


def alone(target, ids, layer_ids):
    """Signals of one document by itself, from transformers' plain full output."""
    states = target(input_ids=torch.as_tensor(ids)[None].long(), output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in layer_ids], dim=-1), states[-1][0]


# ---- what is in the shards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, batch_size", [("llama", 1), *((name, 2) for name in TARGETS)])
def test_each_document_has_the_signals_that_it_has_alone(name, batch_size, blocks, tmp_path):
    target = make_target(name)
    manifest = extract_features(target, make_tokenizer(), blocks, tmp_path / "out", batch_size=batch_size, **FLOAT32)
    for split in ("train", "eval"):
        stored, given = FeatureShards(tmp_path / "out", split=split), load_blocks(blocks)[split]
        for i, (block, source) in enumerate(zip(stored, given, strict=True)):
            assert block["seq_lengths"] == source["seq_lengths"] and len(stored) == len(given)
            assert block["input_ids"].tolist() == source["input_ids"]
            assert block["loss_mask"].tolist() == source["loss_mask"]
            parts = [block[key].split(source["seq_lengths"]) for key in ("input_ids", "features", "last_hidden")]
            for ids, features, hidden in zip(*parts) if i < 3 else ():
                expected = alone(target, ids, manifest["layer_ids"])
                torch.testing.assert_close((features, hidden), expected, atol=1e-5, rtol=1e-5)


def test_without_isolation_the_signals_are_others(target_llama, blocks):
    block = load_blocks(blocks)["train"][0]
    row, first = packed_row([block]), block["seq_lengths"][0]
    expected = alone(target_llama, block["input_ids"][first:], LAYERS)
    torch.testing.assert_close([s[0, first:] for s in target_signals(target_llama, row, LAYERS)], list(expected))
    row["position_ids"] = torch.arange(LONGEST)[None]
    for signal, right in zip(target_signals(target_llama, row, LAYERS), expected):
        assert (signal[0, first:] - right).abs().max() > 0.1


# Not flex attention, which gives wrong and changing values on a CPU (torch 2.13), for a single document too.
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_attention_that_runs_here_keeps_documents_apart(attention, name, blocks):
    target = make_target(name)
    target.set_attn_implementation(attention)
    block = load_blocks(blocks)["train"][0]
    row, first = packed_row([block]), block["seq_lengths"][0]
    expected = alone(make_target(name), block["input_ids"][first:], LAYERS)
    torch.testing.assert_close(
        [s[0, first:] for s in target_signals(target, row, LAYERS)], list(expected), atol=1e-5, rtol=1e-5
    )
    row["position_ids"] = torch.arange(LONGEST)[None]
    for signal, right in zip(target_signals(target, row, LAYERS), expected):
        assert (signal[0, first:] - right).abs().max() > 0.1


def test_a_target_that_mixes_documents_is_refused(target_llama, blocks, tmp_path):
    check_isolation(target_llama, LAYERS)

    class Mixing(LlamaForCausalLM):
        def forward(self, **inputs):
            return super().forward(**inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])})

    mixing = Mixing(target_llama.config).eval()
    with pytest.raises(ValueError, match="not kept apart by Mixing"):
        extract_features(mixing, make_tokenizer(), blocks, tmp_path / "out", **FLOAT32)


def test_the_teachers_logits_are_those_of_the_target(target_llama, features):
    block = FeatureShards(features)[1]
    ids = block["input_ids"][: block["seq_lengths"][0]].long()
    expected = target_llama(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(target_llama.lm_head(block["last_hidden"])[: len(ids)], expected, atol=1e-5, rtol=1e-5)


def test_a_shard_has_positions_borders_and_dtypes_as_documented(features, blocks):
    shard = load_file(features / "train-00001-of-00004.safetensors")
    row = packed_row([load_blocks(blocks)["train"][i] for i in (3, 4, 5)])
    assert torch.equal(shard["position_ids"], row["position_ids"][0].int())
    assert torch.equal(shard["cu_seqlens"], row["cu_seq_lens_q"])
    assert shard["block_offsets"].tolist() == [0, 24, 47, 71]
    small = ("input_ids", "position_ids", "cu_seqlens", "block_offsets")
    assert all(shard[name].dtype == torch.int32 for name in small) and shard["loss_mask"].dtype == torch.int8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_shorter_dtype_is_the_rounded_float32(dtype, target_llama, blocks, features, tmp_path):
    extract_features(
        target_llama, make_tokenizer(), blocks, tmp_path / "out", layer_ids=LAYERS, **FLOAT32 | {"dtype": dtype}
    )
    for block, exact in zip(FeatureShards(tmp_path / "out"), FeatureShards(features)):
        for name in ("features", "last_hidden"):
            assert torch.equal(block[name], exact[name].to(getattr(torch, dtype)))


def test_states_too_large_for_float16_are_refused(blocks, tmp_path):
    target = make_target("llama")
    target.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(ValueError, match="train blocks 0 to 0: .* not finite .*use bfloat16 or float32"):
        extract_features(target, make_tokenizer(), blocks, tmp_path / "out", **FLOAT32 | {"dtype": "float16"})


def test_counts_and_provenance_are_in_the_manifest(target_llama, features, blocks):
    manifest, made = (json.loads((folder / "manifest.json").read_text()) for folder in (features, blocks))
    for split, shards in (("train", 4), ("eval", 1)):
        assert manifest[split] == made[split] | {"shards": shards}
    assert manifest["complete"] and manifest["layer_ids"] == LAYERS and manifest["dtype"] == "float32"
    assert manifest["files"].keys() == contents(features).keys()
    assert all(
        (features / name).stat().st_size == file["bytes"] <= FLOAT32["shard_size"] + 2000
        for name, file in manifest["files"].items()
    )
    assert manifest["tokenizer_hash"] == made["tokenizer_hash"] and "final norm" in manifest["norm_convention"]


def test_documents_longer_than_the_targets_context_are_refused_before_anything_is_read(blocks, tmp_path):
    target = make_target("llama")
    target.config.max_position_embeddings = 14
    with pytest.raises(ValueError, match="a document of 15 tokens .* context of 14.*--max_seq_len 14"):
        extract_features(target, make_tokenizer(), blocks, tmp_path / "out", layer_ids=LAYERS, **FLOAT32)
    target.config.max_position_embeddings = 16
    extract_features(target, make_tokenizer(), blocks, tmp_path / "out", layer_ids=LAYERS, **FLOAT32)


def test_the_loss_from_stored_features_is_the_online_loss(target_llama, features, blocks, tmp_path):
    class Stored(TargetSignals):
        def __call__(self, inputs):
            return inputs["features"], inputs["last_hidden"]

    drafter = make_drafter(target_llama, eagle_aux_hidden_state_layer_ids=LAYERS, num_depths=4)
    args = PEagleArguments(
        train_file="unused", output_dir=str(tmp_path), report_to="none", eval_strategy="no", use_cpu=True
    )
    losses = {}
    for kind in (TargetSignals, Stored):
        collator = PackingCollator(4, 0.7, 0.2)
        signals = kind(target_llama, drafter.config, drafter.draft_ids(), False)
        trainer = PEagleTrainer(model=drafter, args=args, data_collator=collator, signals=signals)
        for index, block in enumerate(FeatureShards(features)):
            row = collator([block])
            for shift in (0, 1) if kind is Stored else (0,):
                row |= {name: block[name].roll(shift, dims=0)[None] for name in ("features", "last_hidden")}
                losses[kind, index, shift] = trainer.compute_loss(drafter, row).item()
    for index in range(10):
        assert losses[TargetSignals, index, 0] == pytest.approx(losses[Stored, index, 0], abs=1e-5)
        assert abs(losses[TargetSignals, index, 0] - losses[Stored, index, 1]) > 1e-4


# ---- sizes and the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, size", [("10GB", 10**10), ("1.5 mb", 1_500_000), ("2GiB", 2**31), ("7", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "10 XB", "-1GB", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ArgumentTypeError, match="is not a size: write it like 50GB"):
        parse_size(text)


def test_wrong_arguments_are_named_before_the_target_is_loaded(features, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.extract_features.load_target", lambda *_, **__: pytest.fail("loaded the target"))
    for folder, fault in ((tmp_path, "has no manifest.json"), (features, "holds features, not blocks")):
        with pytest.raises(SystemExit, match=f"error: .*{fault}"):
            main(["--input", str(folder), "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), "--max_disk", "10XB"])
    assert "argument --max_disk: '10XB' is not a size: write it like 50GB" in capsys.readouterr().err


def test_shards_can_be_read_by_those_who_read_the_manifest(features):
    assert len({file.stat().st_mode for file in features.iterdir() if file.suffix in (".json", ".safetensors")}) == 1


def test_what_would_not_fit_is_refused_before_the_target_reads(target_llama, blocks, tmp_path, monkeypatch):
    options = FLOAT32 | {"shard_size": 10**9}
    with pytest.raises(OSError, match=r"take 0.15 MB, over --max_disk 0.10 MB.*raise --max_disk"):
        extract_features(target_llama, make_tokenizer(), blocks, tmp_path / "out", max_disk=100_000, **options)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    with pytest.raises(OSError, match=r"0.15 MB are to be written, but .* has 0.05 MB free.*make room"):
        extract_features(target_llama, make_tokenizer(), blocks, tmp_path / "out", **options)
    assert not contents(tmp_path / "out")
    with pytest.raises(ValueError, match="does not hold one block"):
        extract_features(target_llama, make_tokenizer(), blocks, tmp_path / "out", **options | {"shard_size": 1000})


def test_the_command(target_llama, blocks, features, tmp_path, capsys):
    target_llama.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    command = ["--model_path", str(tmp_path / "target"), "--input", str(blocks), "--output", str(tmp_path / "out")]
    command += ["--dtype", "float32", "--shard_size", str(FLOAT32["shard_size"]), "--layer_ids", "1", "2", "3"]
    main(command)
    out, bar = capsys.readouterr()
    assert "tokens x 521 bytes = 0.15 MB in 5 shards" in out and "free" in out
    assert "minutes, at" in out and "tokens/s" in bar
    assert_same(tmp_path / "out", features)
    with pytest.raises(SystemExit, match="error: .* other settings: layer_ids"):
        main([*command[:-1], "0"][:-3] + ["0", "1", "2"])
