"""The loss on packed documents, the Trainer and its checkpoints, and that one sample can be learned by heart.

All models are tiny and random, built here; float32 on the CPU.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from arguments_peagle import PEagleArguments
from configuration_peagle import PEagleConfig
from data.collator import PackingCollator
from modeling_peagle import PEagleModel
from train_peagle import freeze, measure_batch
from trainer_peagle import PEagleTrainer, TargetSignals


VOCAB, MASK, DEPTHS = 64, 1, 3
DRAFT_IDS = torch.arange(2, VOCAB, 4)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    **{"bos_token_id": None, "eos_token_id": None},
}


def build_target(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def target():
    return build_target()


def document(length, seed, prompt=3, supervised=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (length,), generator=generator).tolist()
    return ids, [0] * prompt + [supervised] * (length - prompt)


def block(*documents):
    return {
        "input_ids": [token for ids, _ in documents for token in ids],
        "loss_mask": [kept for _, mask in documents for kept in mask],
        "seq_lengths": [len(ids) for ids, _ in documents],
    }


def build_drafter(target, draft_ids=DRAFT_IDS, embeddings="borrowed", **fields):
    config = PEagleConfig.for_target(
        target,
        SimpleNamespace(get_vocab=lambda: {"a": 0}),
        mask_token_id=MASK,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        num_depths=DEPTHS,
        speculation_depth=DEPTHS,
        own_embeddings=embeddings != "borrowed",
        **fields,
    )
    torch.manual_seed(1)
    drafter = PEagleModel.from_target(target, config, draft_ids)
    freeze(drafter, embeddings)
    return drafter


def build_trainer(target, blocks, folder, *, drafter=None, eval_blocks=None, keep=False, cod_ratio=1.0, **kwargs):
    drafter = build_drafter(target, embeddings=kwargs.get("embeddings", "borrowed")) if drafter is None else drafter
    defaults = {
        "train_file": "unused",
        "output_dir": str(folder),
        "max_steps": 1,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "eval_strategy": "no",
        **{"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1},
    }
    return PEagleTrainer(
        model=drafter,
        args=PEagleArguments(**defaults | kwargs),
        train_dataset=blocks,
        eval_dataset=eval_blocks,
        data_collator=PackingCollator(DEPTHS, cod_ratio, 0.0, first_slot=drafter.config.first_slot),
        signals=TargetSignals(target, drafter.config, drafter.draft_ids(), keep),
    )


def state(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def loss_and_gradients(trainer, *documents, one_document=False):
    """Summed over the slots of one packed row; `one_document` drops the document condition of the attention rule."""
    row = trainer.data_collator([block(*documents)])
    if one_document:
        row["document_ids"] = torch.zeros_like(row["document_ids"])
    trainer.model.zero_grad()
    loss = trainer.training_step(trainer.model, row, num_items_in_batch=torch.tensor(1))
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_a_document_loses_and_learns_the_same_whatever_its_neighbour_says(target, tmp_path):
    trainer = build_trainer(target, [], tmp_path)
    # Nothing of the neighbours is supervised, so the loss is the second document's.
    neighbours, own = [document(12, seed, supervised=0) for seed in (1, 2)], document(15, 3)
    (one, one_grads), (other, other_grads) = (loss_and_gradients(trainer, n, own) for n in neighbours)
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    for name, gradient in one_grads.items():
        torch.testing.assert_close(gradient, other_grads[name], atol=1e-5, rtol=1e-5, msg=name)


def test_without_the_document_condition_the_neighbour_would_leak_in(target, tmp_path):
    trainer = build_trainer(target, [], tmp_path)
    neighbours, own = [document(12, seed, supervised=0) for seed in (1, 2)], document(15, 3)
    (one, _), (other, _) = (loss_and_gradients(trainer, n, own, one_document=True) for n in neighbours)
    assert (one - other).abs() > 1e-2


def test_a_packed_pair_has_the_losses_and_gradients_of_its_documents_added_up(target, tmp_path):
    trainer, pair = build_trainer(target, [], tmp_path), (document(12, 1), document(15, 3))
    (first, grads), (second, more) = (loss_and_gradients(trainer, d) for d in pair)
    both, both_grads = loss_and_gradients(trainer, *pair)
    torch.testing.assert_close(both, first + second, atol=1e-4, rtol=1e-5)
    for name, gradient in both_grads.items():
        torch.testing.assert_close(gradient, grads[name] + more[name], atol=1e-4, rtol=1e-4, msg=name)
    assert (loss_and_gradients(trainer, *pair, one_document=True)[0] - both).abs() > 1e-2


def test_every_trainable_tensor_learns(target, tmp_path):
    _, gradients = loss_and_gradients(build_trainer(target, [], tmp_path), document(15, 3))
    assert [name for name, gradient in gradients.items() if not gradient.any()] == []
    assert "mask_hidden" in gradients and "lm_head.weight" not in gradients


# The Trainer

BLOCKS = [
    block(document(10, 1), document(8, 2)),
    block(document(20, 3)),
    block(document(6, 4), document(6, 5), document(9, 6)),
    block(document(30, 7)),
]


def one_update(target, folder, token_weighted=True, **kwargs):
    trainer = build_trainer(target, BLOCKS, folder, optim="sgd", learning_rate=0.1, **kwargs)
    trainer.model_accepts_loss_kwargs = token_weighted
    trainer.train()
    return state(trainer)


def test_accumulation_over_4_batches_is_one_batch_of_4(target, tmp_path):
    batch = one_update(target, tmp_path, per_device_train_batch_size=4)
    accumulated = one_update(target, tmp_path, gradient_accumulation_steps=4)
    torch.testing.assert_close(batch, accumulated, atol=1e-6, rtol=1e-5)
    mean_of_means = one_update(target, tmp_path, gradient_accumulation_steps=4, token_weighted=False)
    assert max((batch[name] - mean_of_means[name]).abs().max() for name in batch) > 1e-5


UNSUPERVISED = block(document(12, 1, supervised=0))


def test_in_bfloat16_the_loss_is_still_taken_in_float32(target, tmp_path):
    """A drafter that is nearly right has a loss far below what bfloat16 rounds off the entropies, some 0.01 each."""
    found = []
    for bf16 in (False, True):
        drafter = build_drafter(target, draft_ids=None)
        drafter.lm_head.weight.data.zero_()
        flat = build_target()
        flat.lm_head.weight.data.mul_(0.05)
        trainer = build_trainer(flat, BLOCKS[:1], tmp_path, drafter=drafter, bf16=bf16, learning_rate=0.0)
        trainer.train()
        found += losses(trainer)
    assert 0 < found[0] < 0.01
    assert found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize("bf16, expected", [(False, torch.float32), (True, torch.bfloat16)])
def test_the_step_that_is_measured_rounds_as_training_does(target, tmp_path, bf16, expected):
    trainer = build_trainer(target, BLOCKS[:1], tmp_path, bf16=bf16, learning_rate=0.0)
    seen = []
    trainer.model.fc.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    measure_batch(trainer)
    assert set(seen) == {expected}
    seen.clear()
    trainer.train()
    assert set(seen) == {expected}


def test_what_is_foretold_is_the_mean_of_unlike_batches(target, tmp_path, monkeypatch):
    blocks = [block(document(length, length)) for length in (6, 12, 30)]
    trainer = build_trainer(target, blocks, tmp_path)
    seen, step = [], trainer.training_step
    watched = lambda model, batch, count: (seen.append(batch["input_ids"].numel()), step(model, batch, count))  # noqa: E731
    monkeypatch.setattr(trainer, "training_step", watched)
    tokens, slots, seconds = measure_batch(trainer)
    assert tokens == 16 and slots > 16 and seconds > 0
    assert seen[0] == seen[1] and sorted(seen[1:]) == [6, 12, 30]  # one to warm up


def test_a_step_with_nothing_supervised_leaves_the_parameters_alone(target, tmp_path):
    trainer = build_trainer(target, [UNSUPERVISED], tmp_path, max_steps=2)
    before = state(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert changed(before, state(trainer)) == set()


def test_a_step_with_nothing_supervised_has_loss_0(target, tmp_path):
    # The Trainer would log a NaN as 0, hence its option.
    trainer = build_trainer(target, [UNSUPERVISED], tmp_path, logging_nan_inf_filter=False)
    trainer.train()
    assert losses(trainer) == [0.0]


def test_evaluation_on_nothing_supervised_has_loss_0(target, tmp_path):
    assert build_trainer(target, [], tmp_path, eval_blocks=[UNSUPERVISED]).evaluate()["eval_loss"] == 0.0


def tokens_read_by(target, trainer):
    read = []
    hook = target.register_forward_pre_hook(lambda _, args, kw: read.append(kw["input_ids"].numel()), with_kwargs=True)
    trainer.train()
    hook.remove()
    return sum(read)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_keep_features_changes_no_loss_and_reads_each_block_once(target, tmp_path, batch_size):
    options = {"max_steps": -1, "num_train_epochs": 4, "per_device_train_batch_size": batch_size}
    anew, kept = (build_trainer(target, BLOCKS, tmp_path, keep=keep, **options) for keep in (False, True))
    assert (tokens_read_by(target, anew), tokens_read_by(target, kept)) == (4 * 89, 89)
    # Other blocks beside it in a batch round differently.
    assert losses(kept) == (losses(anew) if batch_size == 1 else pytest.approx(losses(anew), rel=1e-4))


def test_keep_features_does_not_take_held_out_blocks_for_training_blocks(target, tmp_path):
    options = {"eval_blocks": [block(document(10, 20), document(8, 21))], "max_steps": 4}
    anew, kept = (build_trainer(target, BLOCKS, tmp_path, keep=keep, **options) for keep in (False, True))
    anew.train(), kept.train()
    assert anew.evaluate()["eval_loss"] == kept.evaluate()["eval_loss"]


# Checkpoints

LOAD = """
import sys, torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
torch.save({"tensors": model.state_dict(), "draft_ids": model.draft_ids()}, sys.argv[2])
"""


def test_a_checkpoint_of_the_trainer_loads_in_a_clean_process_elsewhere(target, tmp_path):
    trainer = build_trainer(target, BLOCKS, tmp_path / "run", save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    checkpoint, cwd, loaded = tmp_path / "run/checkpoint-2", tmp_path / "elsewhere", tmp_path / "loaded.pt"
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    cwd.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, str(checkpoint), str(loaded)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = torch.load(loaded)
    assert result["tensors"].keys() == state(trainer).keys()
    assert changed(state(trainer), result["tensors"]) == set()
    assert torch.equal(result["draft_ids"], DRAFT_IDS)


# What is frozen


def trained_rows(target, folder, embeddings, **kwargs):
    """Rows of the drafter's embeddings that training changes."""
    trainer = build_trainer(target, BLOCKS, folder, embeddings=embeddings, max_steps=3, **kwargs)
    before = state(trainer)["embed_tokens.weight"]
    trainer.train()
    return set((state(trainer)["embed_tokens.weight"] != before).any(dim=1).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_mask_row_trains_only_that_row_of_the_embeddings(target, tmp_path, weight_decay):
    assert trained_rows(target, tmp_path, "mask_row", weight_decay=weight_decay) == {MASK}


def test_trained_embeddings_learn_other_rows_too(target, tmp_path):
    rows = trained_rows(target, tmp_path, "trained")
    assert MASK in rows and len(rows) > 10


@pytest.mark.parametrize("embeddings", ["borrowed", "mask_row", "trained"])
def test_only_drafters_with_their_own_embeddings_save_them(target, tmp_path, embeddings):
    trainer = build_trainer(target, BLOCKS, tmp_path, embeddings=embeddings)
    trainer.save_model()
    assert ("embed_tokens.weight" in load_file(tmp_path / "model.safetensors")) == (embeddings != "borrowed")


@pytest.mark.parametrize("embeddings", ["borrowed", "mask_row", "trained"])
def test_training_touches_neither_the_head_nor_the_target(target, tmp_path, embeddings):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = build_trainer(target, BLOCKS, tmp_path, embeddings=embeddings, max_steps=3, weight_decay=0.1)
    trainer.train()
    assert torch.equal(trainer.model.lm_head.weight, target.lm_head.weight[DRAFT_IDS])
    assert changed(before, target.state_dict()) == set()


# One sample by heart


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory):
    """A target, a prompt, its greedy answer, and a one-layer drafter trained on nothing else."""
    target, prompt = build_target(seed=2), torch.randint(3, 60, (1, 8))
    sequence = target.generate(prompt, max_new_tokens=40, do_sample=False)
    answer = sequence[0, 8:].tolist()
    assert len(set(answer)) > 10  # a loop would be learned from the tokens alone
    drafter = build_drafter(target, draft_ids=None)
    sample = [block((sequence[0].tolist(), [0] * 8 + [1] * 40))]
    options = {"max_steps": 300, "learning_rate": 6e-3, "lr_scheduler_type": "cosine", "logging_steps": 300}
    build_trainer(target, sample, tmp_path_factory.mktemp("by_heart"), drafter=drafter, keep=True, **options).train()
    return SimpleNamespace(target=target, prompt=prompt, sequence=sequence, drafter=drafter.eval())


def decode(sample):
    with sample.drafter.attach(sample.target) as target:
        options = {"assistant_model": sample.drafter, "return_dict_in_generate": True, "do_sample": False}
        output = target.generate(sample.prompt, max_new_tokens=40, num_assistant_tokens=DEPTHS, **options)
    rounds = [*zip(output.stats.accepted, output.stats.drafted)]
    # Of those that drafted so deep: the last may not, as the text ends.
    deep = [[kept > depth for kept, drafted in rounds if drafted > depth] for depth in range(DEPTHS)]
    return output.sequences, [sum(kept) / len(kept) for kept in deep]


def test_a_sample_learned_by_heart_is_accepted_at_every_depth(by_heart):
    sequence, acceptance = decode(by_heart)
    assert torch.equal(sequence, by_heart.sequence)
    assert min(acceptance) > 0.95, acceptance


def one_position_off(features):
    return features.roll(1, dims=1) if features.shape[1] > 1 else torch.zeros_like(features)


def layers_swapped(features):
    return features.roll(32, dims=2)


@pytest.mark.parametrize("spoil", [one_position_off, layers_swapped])
def test_with_spoilt_features_the_same_drafter_is_accepted_clearly_less(by_heart, monkeypatch, spoil):
    draft = by_heart.drafter.draft
    monkeypatch.setattr(by_heart.drafter, "draft", lambda ids, features, *rest: draft(ids, spoil(features), *rest))
    sequence, acceptance = decode(by_heart)
    assert torch.equal(sequence, by_heart.sequence)
    assert max(acceptance[1:]) < 0.5, acceptance
