"""What stands beside a drafter's head: a bias by the token before, and the loss of a head that is not trained."""

import torch
import torch.nn.functional as F
from torch import nn


class MarkovHead(nn.Module):
    """What the token at one depth says of the next: a bias of low rank on the scores, at the start none.

    All depths are drafted at once, so a slot does not know which token the depth before it will be given; this is the one
    thing that drafting one after the other has over it. Idea: DSpark (https://huggingface.co/papers/2607.05147).
    """

    def __init__(self, vocab_size: int, rank: int):
        super().__init__()
        self.given = nn.Embedding(vocab_size, rank)
        self.next = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, previous: torch.LongTensor) -> torch.Tensor:
        """The bias `(rows, draft_vocab_size)` after the draft-vocabulary tokens `previous`, `(rows,)`; -100 for unknown."""
        known = (previous >= 0)[:, None]
        return self.next(self.given(previous.clamp(min=0)) * known)

    def between(self, previous: torch.LongTensor, following: torch.LongTensor) -> torch.Tensor:
        """The bias on the tokens `following`, `(..., m)`, alone after each of `previous`, `(..., n)`; `(..., n, m)`."""
        return self.given(previous) @ F.embedding(following, self.next.weight).mT


class FrozenHeadScore(torch.autograd.Function):
    """`score(head(hidden_states), rows)` of a few rows at a time, whose first line is the loss that is differentiated.

    A row's loss depends on its own hidden state alone, and a frozen head needs no gradient: so each part's gradient is
    taken at once, while its logits are still in the processor's cache, and the logits of all rows never exist.
    """

    @staticmethod
    def forward(ctx, hidden_states, head, score, size):
        scores, gradients = [], []
        for start in range(0, max(len(hidden_states), 1), size):
            part = slice(start, min(start + size, len(hidden_states)))
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                hidden = hidden_states[part].detach().requires_grad_(ctx.needs_input_grad[0])
                scores.append(score(head(hidden), part))
                if ctx.needs_input_grad[0]:
                    gradients += torch.autograd.grad(scores[-1][0].sum(), hidden)
        ctx.save_for_backward(torch.cat(gradients) if gradients else None)
        return torch.cat(scores, dim=-1).detach()

    @staticmethod
    def backward(ctx, gradient):
        (of_losses,) = ctx.saved_tensors
        return of_losses * gradient[0][:, None], None, None, None
