"""A second run of `train_peagle.py` into a folder: beside the first, or behind it with other flags."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from safetensors.torch import load_file
from test_train_command import arguments_for, workplace  # noqa: F401

from resume_peagle import OPTIMIZER
from train_peagle import main


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_lives(workplace, tmp_path):  # noqa: F811
    folder, output = workplace[0], tmp_path / "out"
    flags = ["--train_file", folder / "chats.jsonl", "--target_model", folder / "target", "--output_dir", output]
    flags += ["--max_steps", 10**5, "--save_every", 10**5, "--eval_fraction", 0, "--use_cpu", "true", "--yes"]
    first = subprocess.Popen(
        [sys.executable, "-u", ROOT / "train_peagle.py", *map(str, flags)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert any("updates of" in line for line in first.stdout)
        with pytest.raises(FileExistsError, match="Another run writes to .*out: wait for it, or name another"):
            main(arguments_for(workplace, output, target_model="is not even looked for"))
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    main(arguments_for(workplace, output))
    assert (output / "model.safetensors").exists()


def test_other_flags_are_told_and_same_ones_are_not(workplace, tmp_path, capsys):  # noqa: F811
    flags = {"max_steps": 4, "save_steps": 2, "eval_fraction": 0.2, "eval_new_tokens": 4, "feature_noise": 0.1}
    main(arguments_for(workplace, tmp_path / "a", **flags))
    whole = load_file(tmp_path / "a/checkpoint-4/model.safetensors")
    again = flags | {"resume_from_checkpoint": str(tmp_path / "a/checkpoint-2")}
    capsys.readouterr()
    idle = {"eval_steps": 1, "logging_steps": 1, "save_dtype": "float32", "max_minutes": 9}
    main(arguments_for(workplace, tmp_path / "b", **again | idle))
    assert "not bit for bit" not in capsys.readouterr().out
    same = load_file(tmp_path / "b/checkpoint-4/model.safetensors")
    assert all(same[name].equal(tensor) for name, tensor in whole.items())

    changes = {"loss": "ce", "depth_weights": "decay", "lr_scheduler_type": "linear", "cod_ratio": 0.5, "seed": 7}
    main(arguments_for(workplace, tmp_path / "c", **again | changes))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not bit for bit" in line]
    assert line.endswith(
        "checkpoint-2: cod_ratio 0.7 there and 0.5 here, depth_weights uniform there and decay here, loss kl there and ce "
        "here, lr_scheduler_type cosine there and linear here, seed 42 there and 7 here"
    )
    assert not load_file(tmp_path / "c/checkpoint-4/model.safetensors")["fc.weight"].equal(whole["fc.weight"])


def test_what_the_optimizer_would_not_take_over_is_refused(workplace, tmp_path):  # noqa: F811
    main(arguments_for(workplace, tmp_path))
    changes = {"learning_rate": 0.5, "weight_decay": 0.5, "adam_beta2": 0.5, "optim": "sgd"}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"{name} .* there and {value} here.*--init_from_drafter .*checkpoint-1"):
            main(arguments_for(workplace, tmp_path, resume_from_checkpoint="true", max_steps=2, **{name: value}))
    # As it is said there.
    main(arguments_for(workplace, tmp_path / "b", init_from_drafter=str(tmp_path / "checkpoint-1"), learning_rate=0.5))


def test_without_the_refusal_another_learning_rate_would_be_ignored(workplace, tmp_path, monkeypatch):  # noqa: F811
    flags = {"max_steps": 4, "save_steps": 2, "lr_scheduler_type": "constant"}
    main(arguments_for(workplace, tmp_path / "a", **flags))
    monkeypatch.setattr("resume_peagle.OPTIMIZER", ())
    assert "learning_rate" in OPTIMIZER
    flags |= {"resume_from_checkpoint": str(tmp_path / "a/checkpoint-2"), "learning_rate": 0.5}
    main(arguments_for(workplace, tmp_path / "b", **flags))
    one, other = (load_file(tmp_path / name / "checkpoint-4/model.safetensors") for name in "ab")
    assert all(other[name].equal(tensor) for name, tensor in one.items())


def test_other_data_under_the_same_name_are_refused(workplace, tmp_path, capsys):  # noqa: F811
    """Also where the draft tokens are the same."""
    flags = {"max_steps": 2, "save_steps": 1, "train_file": str(tmp_path / "chats.jsonl"), "draft_vocab_size": 0}
    lines = (workplace[0] / "chats.jsonl").read_text().splitlines(True)
    Path(flags["train_file"]).write_text("".join(lines))
    main(arguments_for(workplace, tmp_path / "out", **flags))
    again = flags | {"resume_from_checkpoint": "true", "max_steps": 3}
    Path(flags["train_file"]).write_text("".join(lines[1:]))
    with pytest.raises(
        ValueError, match="checkpoint-2 was in the midst of other data.*--init_from_drafter .*checkpoint-2"
    ):
        main(arguments_for(workplace, tmp_path / "out", **again))
    Path(flags["train_file"]).write_text("".join(lines))
    capsys.readouterr()
    main(arguments_for(workplace, tmp_path / "out", **again))
    assert "2 updates done, 1 updates of" in capsys.readouterr().out  # what is told to come
