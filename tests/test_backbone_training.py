"""Training of drafters whose body is a pretrained language model: what learns, LoRA and its merging, checkpoints."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_target, prompt_of
from safetensors.torch import load_file
from test_backbone import slots_with_first, trained, training_logits
from test_train_command import arguments_for, workplace  # noqa: F401
from test_training import (
    BLOCKS,
    DRAFT_IDS,
    MASK,
    block,
    build_target,
    build_trainer,
    changed,
    decode,
    losses,
    state,
)

from arguments_peagle import PEagleArguments
from configuration_peagle import PEagleBackboneConfig
from lora_peagle import add_lora, merge_lora
from modeling_peagle_backbone import PEagleBackboneModel
from train_peagle import freeze, main


@pytest.fixture(scope="module")
def target():
    return build_target()


def build_drafter(target, backbone, lora=False, draft_ids=DRAFT_IDS):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    size = {"draft_vocab_size": None if draft_ids is None else len(draft_ids), "num_depths": 3, "speculation_depth": 3}
    config = PEagleBackboneConfig.for_backbone(target, tokenizer, backbone, tokenizer, mask_token_id=MASK, **size)
    torch.manual_seed(1)
    drafter = PEagleBackboneModel.from_backbone(backbone, config, draft_ids)
    add_lora(drafter, 8, 16, "all-linear") if lora else freeze(drafter, "mask_row")
    return drafter


def trainer_of(target, folder, *, backbone="llama", lora=False, **options):
    return build_trainer(target, BLOCKS, folder, drafter=build_drafter(target, make_target(backbone), lora), **options)


def gradients(trainer):
    trainer.training_step(trainer.model, trainer.data_collator(BLOCKS), num_items_in_batch=torch.tensor(10))
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("backbone", ["llama", "qwen3", "gemma3"])
def test_the_fusion_learns_first_and_then_everything(target, tmp_path, backbone, lora):
    trainer = trainer_of(target, tmp_path, backbone=backbone, lora=lora)
    # B of LoRA starts at zero too, so that A has to wait for it.
    waits = [name for name, grad in gradients(trainer).items() if not grad.any()]
    assert "fc.weight" not in waits and "lm_head.weight" not in waits and "mask_hidden" in waits
    trainer.train()
    assert [name for name, grad in gradients(trainer).items() if not grad.any()] == []


@pytest.mark.parametrize("lora", [False, True])
def test_of_the_embeddings_only_the_mask_tokens_row_learns(target, tmp_path, lora):
    trainer = trainer_of(target, tmp_path, lora=lora, max_steps=3, weight_decay=0.1)
    trainer.train()
    drafter = trainer.model
    if lora:
        merge_lora(drafter)
    before, after = make_target("llama").get_input_embeddings().weight, drafter.get_input_embeddings().weight
    assert (before != after).any(dim=1).nonzero()[:, 0].tolist() == [MASK]


# LoRA


def test_lora_leaves_the_models_own_weights_alone(target, tmp_path):
    trainer = trainer_of(target, tmp_path, lora=True, max_steps=3, weight_decay=0.1)
    before = state(trainer)
    trainer.train()
    differ = changed(before, state(trainer))
    new = {name for name in before if "lora_" in name or "trainable_tokens_delta" in name}
    assert new and differ == new | {
        *("fc.weight", "mask_hidden", "lm_head.weight"),
        *(name for name in before if name.startswith("fc_norm")),
    }


LOAD = """
import sys, torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__name__ == "PEagleBackboneModel" and type(model).__module__.startswith("transformers_modules.")
assert "peft" not in sys.modules and callable(model.attach)
torch.save(model(**torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def logits_in_a_clean_process(folder, inputs, tmp_path):
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, folder, tmp_path / "inputs.pt", tmp_path / "logits.pt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(tmp_path / "logits.pt")


@pytest.mark.parametrize("backbone", ["llama", "qwen3", "gemma3"])
def test_a_merged_drafter_says_the_same_and_stands_alone(target, tmp_path, backbone):
    trainer = trainer_of(target, tmp_path, backbone=backbone, lora=True, max_steps=5, learning_rate=0.01)
    trainer.train()
    drafter, row = trainer.model.eval(), trainer.data_collator(BLOCKS)
    row["features"], _ = trainer.signals(row)
    slots, _ = trainer._slots(row, row["anchor"], row["depth"], 0, 30, 0)
    lora, plain = drafter(**slots).logits, build_drafter(target, make_target(backbone))(**slots).logits
    assert (lora - plain).abs().max() > 1e-2
    merge_lora(drafter)
    assert drafter.config.lora is None
    merged = drafter(**slots).logits
    torch.testing.assert_close(merged, lora, atol=1e-5, rtol=1e-5)
    drafter.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits_in_a_clean_process(tmp_path / "merged", slots, tmp_path), merged)


def test_target_modules_that_the_model_lacks_are_named(target):
    with pytest.raises(ValueError, match="names c_attn, but .* down_proj, gate_proj, .*q_proj"):
        add_lora(build_drafter(target, make_target("llama")), 8, 16, "q_proj,c_attn")


def test_named_target_modules_are_the_only_ones(target):
    drafter = build_drafter(target, make_target("llama"))
    add_lora(drafter, 8, 16, "q_proj,v_proj")
    learned = {name.split(".lora_")[0].rsplit(".")[-1] for name, _ in drafter.named_parameters() if "lora_" in name}
    assert learned == {"q_proj", "v_proj"}


# Checkpoints


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(target, tmp_path, lora):
    options = {"lora": lora, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "cod_ratio": 0.5}
    straight, resumed = (trainer_of(target, tmp_path / name, **options) for name in ("one", "two"))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "one/checkpoint-3"))
    assert changed(load_file(tmp_path / "one/checkpoint-3/model.safetensors"), state(straight))
    assert losses(resumed) == losses(straight)
    assert changed(state(straight), state(resumed)) == set()


@pytest.mark.parametrize("backbone", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_a_reloaded_drafter_drafts_the_same(target, tmp_path, backbone, draft_ids):
    drafter = trained(build_drafter(target, make_target(backbone), draft_ids=draft_ids)).eval()
    drafter.save_pretrained(tmp_path)
    again, tokens = PEagleBackboneModel.from_pretrained(tmp_path), prompt_of(20)[0].clamp(max=60)
    assert again.config.to_json_string() == drafter.config.to_json_string()
    assert changed(drafter.state_dict(), again.state_dict()) == set()
    slots = slots_with_first(len(tokens))
    assert torch.equal(*(training_logits(target, model, tokens, *slots) for model in (drafter, again)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "peagle_backbone" and "eagle_config" not in config
    for dtype in (torch.bfloat16, torch.float16):
        half = PEagleBackboneModel.from_pretrained(tmp_path, dtype=dtype)
        assert {p.dtype for p in half.parameters()} == {dtype}


def test_another_tokenizer_or_family_is_refused(target):
    tokenizers = [SimpleNamespace(get_vocab=lambda i=i: {"a": i}) for i in range(2)]
    backbone = make_target("llama")
    with pytest.raises(ValueError, match="another meaning"):
        PEagleBackboneConfig.for_backbone(target, tokenizers[0], backbone, tokenizers[1], mask_token_id=MASK)
    backbone.config.model_type = "gpt2"
    with pytest.raises(ValueError, match="gpt2 model cannot be a drafter; llama, qwen3"):
        PEagleBackboneConfig.for_backbone(target, tokenizers[0], backbone, tokenizers[0], mask_token_id=MASK)


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_lora": True}, "name one"),
        ({"drafter_model": "x", "embeddings": "borrowed"}, "choose mask_row or trained"),
        ({"drafter_model": "x", "use_lora": True, "embeddings": "trained"}, "--use_lora choose mask_row"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        PEagleArguments(train_file="chats.jsonl", output_dir=str(tmp_path), use_cpu=True, **arguments)


def test_the_command_trains_resumes_and_merges(workplace, tmp_path):  # noqa: F811
    model = {"drafter_model": str(workplace[0] / "target"), "max_steps": 2}
    lora = model | {"use_lora": True, "lora_rank": 4, "lora_alpha": 8, "save_dtype": "float32"}
    main(arguments_for(workplace, tmp_path / "full", **model))
    for output, resume in (("straight", None), ("broken", None), ("broken", "true")):
        steps = {"max_steps": 4 if output == "straight" or resume else 2, "lr_scheduler_type": "constant"}
        main(arguments_for(workplace, tmp_path / output, **lora | steps, resume_from_checkpoint=resume, save_steps=2))
    for other in ({"lora_alpha": 16}, {"use_lora": False}, {"use_lora": False, "drafter_model": None}):
        with pytest.raises(ValueError, match=r"--resume: .* there and .* here"):
            main(arguments_for(workplace, tmp_path / "broken", **lora | other, resume_from_checkpoint="true"))
    straight, broken = (PEagleBackboneModel.from_pretrained(tmp_path / name) for name in ("straight", "broken"))
    assert changed(straight.state_dict(), broken.state_dict()) == set()
    assert (tmp_path / "broken/modeling_peagle_backbone.py").read_text() == (
        ROOT / "modeling_peagle_backbone.py"
    ).read_text()
    assert PEagleBackboneModel.from_pretrained(tmp_path / "full").dtype == torch.float16
    command = [sys.executable, ROOT / "evaluate_peagle.py", "--drafter", tmp_path / "full"]
    options = ["--target", model["drafter_model"], "--num_prompts", "1", "--max_new_tokens", "8"]
    done = subprocess.run(command + options, capture_output=True, text=True)
    assert done.returncode == 0 and "tau" in done.stdout, done.stderr[-2000:]


# One sample by heart


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "backbone, lora",
    [("llama", False), pytest.param("gemma3", False, marks=SLOW), pytest.param("gemma3", True, marks=SLOW)],
)
def test_a_sample_learned_by_heart_is_accepted_at_every_depth(tmp_path, backbone, lora):
    target, prompt = build_target(seed=2), torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(5))
    sequence = target.generate(prompt, max_new_tokens=40, do_sample=False)
    assert len(set(sequence[0, 8:].tolist())) > 10  # a loop would be learned from the tokens alone
    drafter = build_drafter(target, make_target(backbone), lora, draft_ids=None)
    sample = [block((sequence[0].tolist(), [0] * 8 + [1] * 40))]
    options = {"max_steps": 200, "learning_rate": 0.01, "lr_scheduler_type": "cosine", "loss": "ce"}
    build_trainer(target, sample, tmp_path, drafter=drafter, keep=True, **options).train()
    if lora:
        merge_lora(drafter)
    by_heart = SimpleNamespace(target=target, prompt=prompt, drafter=drafter.eval())
    output, acceptance = decode(by_heart)
    assert torch.equal(output, sequence)
    assert min(acceptance) > 0.95, acceptance
