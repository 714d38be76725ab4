"""Muon for the matrices of a drafter, AdamW for all else: a drafter learns more of each token than by AdamW alone."""

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


# Their rows belong to tokens, each of which a step changes by itself; Muon is for what maps all inputs at once.
HEADS = {"lm_head", "markov_head"}


def matrices_of(drafter: nn.Module) -> list[nn.Parameter]:
    """The trained weights of its linear layers, heads aside."""
    layers = [
        module
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and HEADS.isdisjoint(name.split("."))
    ]
    return [layer.weight for layer in layers if layer.weight.requires_grad]


class MuonWithAdamW(Optimizer):
    """[`torch.optim.Muon`] for some matrices, and what is left of an [`AdamW`] for the other parameters.

    Muon moves a matrix by its momentum made orthogonal, so in all directions alike. Scaled to the size of AdamW's updates, it
    takes AdamW's learning rate and decay. Idea: https://kellerjordan.github.io/posts/muon/, the scale: https://arxiv.org/abs/2502.16982

    Args:
        adamw (`AdamW`): A fresh one of all parameters, from which the matrices are taken.
        matrices (`list[nn.Parameter]`): Two-dimensional parameters.
        weight_decay (`float`): Of the matrices.
    """

    def __init__(self, adamw: AdamW, matrices: list[nn.Parameter], weight_decay: float):
        taken = set(matrices)
        for group in adamw.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in taken]
        options = {"lr": adamw.defaults["lr"], "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self.parts = [Muon(matrices, **options), adamw]
        super().__init__(
            [parameter for part in self.parts for group in part.param_groups for parameter in group["params"]], {}
        )
        self._share_groups()

    def _share_groups(self):
        """The groups are those of both, so that a schedule that sets a rate here sets it there."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict):
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
