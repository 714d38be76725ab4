"""Two processes learn what one does: data parallel, and with the drafter spread over both; on the CPU with gloo."""

import os
import subprocess
import sys

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig
from conftest import ROOT
from safetensors.torch import load_file


def launch(folder, processes, *arguments):
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(ROOT / "tests/distributed.py"), str(folder), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("blocks_per_step", [2, 4])
def test_two_processes_are_one(tmp_path, blocks_per_step):
    launch(tmp_path / "one", 1, "train", blocks_per_step)
    launch(tmp_path / "two", 2, "train", blocks_per_step)
    one, two = (torch.load(tmp_path / name / "result.pt") for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_a_drafter_spread_over_processes_has_the_same_gradients(tmp_path):
    launch(tmp_path / "run", 2, "gradients")
    whole, sharded = (torch.load(tmp_path / "run" / f"{kind}.pt") for kind in (False, True))
    torch.testing.assert_close(sharded["loss"], whole["loss"])
    for name, gradient in whole["gradients"].items():
        torch.testing.assert_close(sharded["gradients"][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_the_configurations_of_the_repository(name):
    path = ROOT / "accelerate_configs" / f"{name}.yaml"
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
