"""What `test_distributed.py` launches on several processes; the first of them writes the result."""

import os
import sys
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from conftest import ROOT
from test_training import BLOCKS, UNSUPERVISED, block, build_drafter, build_target, build_trainer, document
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from arguments_peagle import parse_arguments
from train_peagle import main


def train(folder: Path, blocks_per_step: int):
    """Four steps of as many blocks each. In the second step of two, one of two processes has nothing to learn; of one document
    the first segments have nothing to score."""
    blocks = [
        *BLOCKS[:2],
        UNSUPERVISED,
        *BLOCKS[2:],
        block(document(12, 8)),
        block((document(25, 9)[0], [0] * 20 + [1] * 5)),
        BLOCKS[0],
    ]
    options = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "segment_length": 9}
    trainer = build_trainer(build_target(), blocks, folder, **options)
    trainer.args.gradient_accumulation_steps = blocks_per_step // trainer.args.world_size
    trainer._get_train_sampler = lambda dataset=None: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        torch.save({"losses": losses, "processes": trainer.args.world_size}, folder / "result.pt")


def gradients(folder: Path, sharded: bool):
    """Of one row in segments, with the drafter on one process or spread over all of them."""
    drafter = build_drafter(build_target())
    trainer = build_trainer(build_target(), [], folder, drafter=drafter, segment_length=9)
    if sharded:
        mesh = init_device_mesh("cpu", (trainer.args.world_size,))
        for module in (*drafter.layers, drafter):
            fully_shard(module, mesh=mesh)
    row = trainer.data_collator([block(document(40, 1), document(12, 2))])
    loss = trainer.training_step(drafter, row, num_items_in_batch=torch.tensor(10))
    grads = {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}
    grads = {name: grad.full_tensor() if sharded else grad for name, grad in grads.items()}
    if trainer.is_world_process_zero():
        torch.save({"loss": loss, "gradients": grads}, folder / f"{sharded}.pt")


def command(configuration: str, arguments: list[str]):
    """`train_peagle.py` under a file of `accelerate_configs`, whose processes accelerate would only give GPUs to."""
    plugin = yaml.safe_load((ROOT / "accelerate_configs" / configuration).read_text()).get("fsdp_config", {})
    start = AcceleratorState.__init__

    def spread(state, *args, **kwargs):
        start(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.fsdp_plugin = kwargs["fsdp_plugin"]
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    if plugin:
        settings = {f"FSDP_{name.removeprefix('fsdp_').upper()}": str(value) for name, value in plugin.items()}
        os.environ.update(settings | {"ACCELERATE_USE_FSDP": "true"})
        AcceleratorState.__init__ = spread
    sys.argv[1:] = arguments
    main(parse_arguments())


if __name__ == "__main__":
    _, folder, task, *rest = sys.argv
    if task == "command":
        command(rest[0], rest[1:])
    elif task == "train":
        train(Path(folder), int(rest[0]))
    else:
        for sharded in (False, True):
            gradients(Path(folder), sharded)
