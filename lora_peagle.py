"""LoRA on the backbone of a drafter while it is trained. The finished drafter is merged, a checkpoint like any other."""

from peft import LoraConfig, get_peft_model
from torch import nn

from modeling_peagle_backbone import PEagleBackboneModel


def add_lora(drafter: PEagleBackboneModel, rank: int, alpha: int, target_modules: str):
    """Freezes the backbone but for low-rank updates of its layers and the mask token's row of the embeddings.

    Everything else of the drafter is trained in full, as before. The settings stand in `drafter.config.lora`.

    Args:
        target_modules (`str`): `all-linear`, or the names of the layers to update, separated by commas.

    Raises:
        ValueError: A name that no linear layer has; the message lists those there are.
    """
    names = target_modules
    if target_modules != "all-linear":
        names = [name.strip() for name in target_modules.split(",")]
        linear = {
            path.rsplit(".")[-1] for path, part in drafter.backbone.named_modules() if isinstance(part, nn.Linear)
        }
        if unknown := sorted(set(names) - linear):
            raise ValueError(
                f"--lora_target_modules names {', '.join(unknown)}, but the linear layers of the drafter's model are "
                f"{', '.join(sorted(linear))}."
            )
    drafter.backbone = get_peft_model(
        drafter.backbone,
        LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=names,
            trainable_token_indices=[drafter.config.mask_token_id],
        ),
    )
    drafter.config.lora = {"rank": rank, "alpha": alpha, "target_modules": target_modules}


def merge_lora(drafter: PEagleBackboneModel):
    """Undoes [`add_lora`], keeping what was learned: the backbone is a plain model again."""
    drafter.backbone = drafter.backbone.merge_and_unload()
    drafter.config.lora = None
