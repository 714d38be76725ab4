"""A run that is broken off goes on bit for bit, after kill -9 in the middle of a save, too.

All models are tiny and random; float32 on the CPU.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_training import BLOCKS, build_drafter, build_target, build_trainer, changed, losses, state

from resume_peagle import checkpoint_to_resume, fault_of, held


@pytest.fixture(scope="module")
def target():
    return build_target()


OPTIONS = {
    "max_steps": 6,
    "save_strategy": "steps",
    "feature_noise": 0.1,
    "depth_weights": "survival",
    "segment_length": 9,
}


def resuming(folder, checkpoint="true"):
    """All of the arguments that `checkpoint_to_resume` reads."""
    checkpoint = checkpoint and str(checkpoint)
    return SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=checkpoint, process_index=0)


@pytest.mark.parametrize(
    ("cod_ratio", "markov_rank", "muon"), [(1.0, 0, False), (0.5, 0, False), (0.5, 4, False), (0.5, 4, True)]
)
def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(target, tmp_path, cod_ratio, markov_rank, muon):
    def trainer(name):
        drafter = build_drafter(target, markov_rank=markov_rank)
        return build_trainer(target, BLOCKS, tmp_path / name, drafter=drafter, cod_ratio=cod_ratio, **options)

    options = OPTIONS | {"save_steps": 3, "muon": muon, "lr_scheduler_type": "cosine"}
    straight, resumed = trainer("one"), trainer("two")
    straight.train()
    middle = load_file(tmp_path / "one/checkpoint-3/model.safetensors")
    assert middle.keys() == state(straight).keys()
    resumed.train(resume_from_checkpoint=str(tmp_path / "one/checkpoint-3"))
    assert changed(middle, state(straight))
    assert losses(resumed) == losses(straight)
    assert changed(state(straight), state(resumed)) == set()


def test_the_best_checkpoint_is_kept_whole(target, tmp_path):
    drafter = build_drafter(target, markov_rank=4)
    trainer = build_trainer(target, BLOCKS, tmp_path, drafter=drafter, **OPTIONS | {"save_steps": 3})
    trainer.train()
    best = load_file(tmp_path / "checkpoint-3/model.safetensors")
    assert {name for name in changed(best, state(trainer)) if name.startswith("markov_head.")}
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-3")
    trainer._load_best_model()
    assert changed(best, state(trainer)) == set()


KILLED = """
import os, signal, sys
from transformers.trainer_callback import TrainerState
from test_resume import OPTIONS
from test_training import BLOCKS, build_drafter, build_target, build_trainer

def die(state, path):
    with open(path, "w") as file:
        file.write('{"epoch": 1.')
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

save = TrainerState.save_to_json
TrainerState.save_to_json = lambda state, path: (die if state.global_step == 4 else save)(state, path)
build_trainer(build_target(), BLOCKS, sys.argv[1], **OPTIONS | {"save_steps": 2}).train()
"""


def test_a_run_killed_while_it_saved_goes_on_from_the_checkpoint_before(target, tmp_path, capsys):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr[-2000:]
    faults = [fault_of(str(tmp_path / f"killed/checkpoint-{step}")) for step in (2, 4)]
    assert faults == [None, "trainer_state.json is damaged"]

    straight, resumed = (
        build_trainer(target, BLOCKS, tmp_path / name, **OPTIONS | {"save_steps": 2}) for name in ("one", "killed")
    )
    straight.train()
    args = resuming(tmp_path / "killed")
    checkpoint = checkpoint_to_resume(args, resumed.model.config)
    assert checkpoint.endswith("checkpoint-2")
    assert "checkpoint-4 is not whole (trainer_state.json is damaged); going on" in capsys.readouterr().out
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == losses(straight)
    assert changed(state(straight), state(resumed)) == set()
    assert all(fault_of(str(tmp_path / f"killed/checkpoint-{step}")) is None for step in (2, 4, 6))


@pytest.fixture(scope="module")
def three(target, tmp_path_factory):
    """A folder of three checkpoints, and what else `checkpoint_to_resume` asks for."""
    folder = tmp_path_factory.mktemp("three")
    trainer = build_trainer(target, BLOCKS, folder, **OPTIONS | {"save_steps": 1, "max_steps": 3})
    trainer.train()
    return folder, trainer.model.config


PARTS = ("trainer_state.json", "config.json", "flags.json", "model.safetensors", "optimizer.pt", "scheduler.pt")


@pytest.mark.parametrize("part", [*PARTS, "rng_state.pth"])
@pytest.mark.parametrize("spoil", ["half", "empty", "missing"])
def test_a_checkpoint_that_is_not_whole_is_passed_over_or_refused_by_name(three, tmp_path, capsys, part, spoil):
    folder, config = shutil.copytree(three[0], tmp_path / "copy"), three[1]
    assert checkpoint_to_resume(resuming(folder), config) == str(folder / "checkpoint-3")
    assert capsys.readouterr().out == ""
    for step in (3, 2):
        file = folder / f"checkpoint-{step}" / part
        whole = file.read_bytes()
        file.unlink()
        if spoil != "missing":
            file.write_bytes(whole[: len(whole) // 2 * (spoil == "half")])
    words = (
        rf"checkpoint-3 is not whole \({part.split('.')[0]}.* is {'missing' if spoil == 'missing' else 'damaged'}\)"
    )
    assert checkpoint_to_resume(resuming(folder), config) == str(folder / "checkpoint-1")
    said = capsys.readouterr().out
    assert re.search(words, said) and re.search(r"checkpoint-2 is not whole .* going on with .*checkpoint-1$", said)
    with pytest.raises(ValueError, match=f"no whole checkpoint in .*checkpoint-3: .*{words}"):
        checkpoint_to_resume(resuming(folder, folder / "checkpoint-3"), config)
    shutil.rmtree(folder / "checkpoint-1")
    with pytest.raises(ValueError, match=f"no whole checkpoint in .*copy: .*{words}"):
        checkpoint_to_resume(resuming(folder), config)


def test_a_bit_that_fell_over_is_found(three, tmp_path):
    checkpoint = shutil.copytree(three[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    content = bytearray((checkpoint / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1  # amid the numbers, which torch.load would read
    (checkpoint / "optimizer.pt").write_bytes(content)
    torch.load(checkpoint / "optimizer.pt")
    assert fault_of(str(checkpoint)) == "optimizer.pt is damaged"


def test_evaluations_change_nothing_of_what_is_learned(target, tmp_path):
    """Not even the noise, whose numbers come from the same generator as the order of the held-out blocks."""
    learned = []
    for every in (2, 3):
        options = {"eval_blocks": [BLOCKS[0]], "eval_strategy": "steps", "eval_steps": every, "eval_new_tokens": 2}
        trainer = build_trainer(target, BLOCKS, tmp_path, **OPTIONS | options | {"save_strategy": "no"})
        trainer.prompts = [[5, 6, 7]]
        trainer.train()
        learned.append(losses(trainer))
    assert learned[0] == learned[1]


def test_a_drafter_that_is_there_is_not_overwritten(target, tmp_path):
    trainer = build_trainer(target, BLOCKS, tmp_path, **OPTIONS | {"save_steps": 2, "max_steps": 2})
    args = resuming(tmp_path, None)
    with held(args):
        assert checkpoint_to_resume(args, trainer.model.config) is None
    trainer.train()
    with pytest.raises(FileExistsError, match="--resume, or name another --output_dir"), held(args):
        pytest.fail("the run began")
    with held(resuming(tmp_path)):  # to go on is allowed
        pass
