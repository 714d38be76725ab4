"""What a slot loses, and what its loss counts: one function each, chosen by the flags of the same names.

The losses compare one slot's scores with the target's distribution over the draft vocabulary. A drafter is judged by
how many of its tokens are kept, and a token at depth d only comes to be looked at if those before it were.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


LK_RATE = 3.0  # how fast the hybrid loss turns from KL to TV as the acceptance grows
DECAY = 0.8


class Teacher(NamedTuple):
    """The target's next-token distribution over the draft vocabulary, and its entropy in nats, of some rows."""

    probs: torch.Tensor  # (rows, draft_vocab_size)
    entropy: torch.Tensor  # (rows,)

    @classmethod
    def of(cls, logits: torch.Tensor) -> "Teacher":
        probs = logits.softmax(dim=-1)
        tiny = torch.finfo(probs.dtype).tiny
        return cls(probs, -torch.linalg.vecdot(probs, probs.clamp(min=tiny).log_()))

    def take(self, rows: torch.LongTensor) -> "Teacher":
        return Teacher(self.probs.index_select(0, rows), self.entropy[rows])


def acceptance(logits: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """How likely a token drawn from the drafter is kept under sampling, `sum(min(p, q))`, that is 1 - TV(p, q).

    `logits` are `(rows, draft_vocab_size)`; the result is `(rows,)`, differentiable.
    """
    return torch.minimum(teacher.probs, logits.softmax(dim=-1)).sum(dim=-1)


class KLDivergence(torch.autograd.Function):
    """KL(teacher || softmax(logits)) of each row, in few passes over memory, which are what it costs on a CPU."""

    @staticmethod
    def forward(ctx, logits, probs, entropy):
        drafter = logits.softmax(dim=-1)
        # The largest probability cannot vanish; it and its score give what all scores are normalised by.
        logsumexp = logits.amax(dim=-1) - drafter.amax(dim=-1).log()
        loss = logsumexp - torch.linalg.vecdot(probs, logits) - entropy
        ctx.save_for_backward(drafter.sub_(probs))  # the gradient
        return loss

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        return difference.mul_(gradient[:, None]), None, None


def kl(logits, teacher, label) -> torch.Tensor:
    """KL(teacher || drafter) of each row, `(rows,)`; for the arguments see [`acceptance`] and [`ce`]."""
    return KLDivergence.apply(logits, *teacher)


def ce(logits, teacher, label) -> torch.Tensor:
    """Cross entropy of each row with the token that the target generated (the loss of the P-EAGLE paper), `(rows,)`.

    `label` is its index in the draft vocabulary, `(rows,)`; -100, where it is not in there, loses nothing.
    """
    return F.cross_entropy(logits, label, reduction="none", ignore_index=-100)


def lk(logits, teacher, label) -> torch.Tensor:
    """The hybrid LK loss: KL while little would be accepted, then 1 - acceptance, whose minimum is what decoding gains.

    The share of KL is `exp(-LK_RATE * acceptance)`. From https://huggingface.co/papers/2602.23881.
    """
    accepted = acceptance(logits, teacher)
    share = torch.exp(-LK_RATE * accepted.detach())
    return share * kl(logits, teacher, label) + (1 - share) * (1 - accepted)


LOSSES = {"kl": kl, "ce": ce, "lk": lk}


def uniform(anchor, depth, accepted) -> torch.Tensor:
    """Every slot counts the same (COD sampling alone makes the deeper ones rarer)."""
    return torch.ones(len(depth), device=depth.device)


def decay(anchor, depth, accepted) -> torch.Tensor:
    """Each depth counts `DECAY` of the one before."""
    return torch.full((len(depth),), DECAY, device=depth.device) ** depth


def survival(anchor, depth, accepted) -> torch.Tensor:
    """How likely decoding comes to look at a slot: the product of the acceptances before it in its own chain.

    Args:
        anchor, depth (`torch.LongTensor` of shape `(rows,)`): The slots; the chains are whole.
        accepted (`torch.Tensor` of shape `(rows,)`): Their [`acceptance`], without a gradient; the others do not need it.
    """
    _, chain = torch.unique(anchor, return_inverse=True)
    reached = accepted.new_ones(len(anchor), len(torch.bincount(depth)) + 1)
    reached[chain, depth + 1] = accepted
    return reached.cumprod(dim=1)[chain, depth]


WEIGHTS = {"uniform": uniform, "decay": decay, "survival": survival}
