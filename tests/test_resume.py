"""A run that is broken off goes on bit for bit, after kill -9 in the middle of a save, too.

All models are tiny and random; float32 on the CPU.
"""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from safetensors.torch import load_file
from test_training import BLOCKS, build_drafter, build_target, build_trainer, changed, losses, state

from train_peagle import checkpoint_to_resume, is_whole


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


@pytest.mark.parametrize(("cod_ratio", "markov_rank"), [(1.0, 0), (0.5, 0), (0.5, 4)])
def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(target, tmp_path, cod_ratio, markov_rank):
    def trainer(name):
        drafter = build_drafter(target, markov_rank=markov_rank)
        return build_trainer(target, BLOCKS, tmp_path / name, drafter=drafter, cod_ratio=cod_ratio, **options)

    options = OPTIONS | {"save_steps": 3}
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
    assert [is_whole(str(tmp_path / f"killed/checkpoint-{step}")) for step in (2, 4)] == [True, False]

    straight, resumed = (
        build_trainer(target, BLOCKS, tmp_path / name, **OPTIONS | {"save_steps": 2}) for name in ("one", "killed")
    )
    straight.train()
    args = SimpleNamespace(output_dir=str(tmp_path / "killed"), resume_from_checkpoint="true")
    checkpoint = checkpoint_to_resume(args, resumed.model.config)
    assert checkpoint.endswith("checkpoint-2") and "checkpoint-4 was not written to its end" in capsys.readouterr().out
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == losses(straight)
    assert changed(state(straight), state(resumed)) == set()
    assert all(is_whole(str(tmp_path / f"killed/checkpoint-{step}")) for step in (2, 4, 6))


def test_a_checkpoint_that_was_not_written_to_its_end_is_refused_by_name(target, tmp_path):
    trainer = build_trainer(target, BLOCKS, tmp_path, **OPTIONS | {"save_steps": 2, "max_steps": 2})
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=str(checkpoint))
    assert checkpoint_to_resume(args, trainer.model.config) == str(checkpoint)
    whole = (checkpoint / "trainer_state.json").read_text()
    json.loads(whole)
    (checkpoint / "trainer_state.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no whole checkpoint in .*checkpoint-2"):
        checkpoint_to_resume(args, trainer.model.config)


def test_a_drafter_that_is_there_is_not_overwritten(target, tmp_path):
    trainer = build_trainer(target, BLOCKS, tmp_path, **OPTIONS | {"save_steps": 2, "max_steps": 2})
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None)
    assert checkpoint_to_resume(args, trainer.model.config) is None
    trainer.train()
    with pytest.raises(ValueError, match="--resume, or name another --output_dir"):
        checkpoint_to_resume(args, trainer.model.config)
