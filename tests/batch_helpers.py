"""Batches of prompts, and drafts that are right or wrong by a plan for each row."""

import torch
import torch.nn.functional as F
from conftest import PATTERNS, VOCAB, drafted, make_drafter, plain, prompt_of

import batch_peagle
from batch_peagle import BatchCache


STATIC = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0)]
PLANS = [PATTERNS["right"], PATTERNS["wrong"], PATTERNS["mixed"], PATTERNS["mixed"][2:]]


def batch_of(lengths):
    """Prompts of these lengths, padded on the left, with their mask."""
    prompts = [prompt_of(length, seed=row)[0] for row, length in enumerate(lengths)]
    widths = [(max(lengths) - length, 0) for length in lengths]
    ids = torch.stack([F.pad(prompt, width, value=2) for prompt, width in zip(prompts, widths)])
    mask = torch.stack([F.pad(torch.ones_like(prompt), width) for prompt, width in zip(prompts, widths)])
    return ids, {"attention_mask": mask, "max_new_tokens": 10}


class Script:
    """Drafts that are right or wrong by a plan per row, from a real drafter whose proposals are replaced.

    `drafts` has the rows of each drafter forward, `batches` those of each target forward after the prefill.
    """

    def __init__(self, monkeypatch, reference, mask, plans=PLANS, wide=False):
        self.padding = (mask == 0).sum(dim=1).tolist()
        self.reference, self.plans, self.wide = reference.tolist(), plans, wide
        self.drawn, self.drafts, self.batches, self.caches = [0] * len(reference), [], [], []
        draft_rows, masks, script = batch_peagle.draft_rows, batch_peagle.tree_masks, self

        class Numbered(BatchCache):
            """Knows which row of the first batch each of its rows is."""

            def __init__(self, batch):
                super().__init__(batch)
                self.rows = list(range(batch))
                script.caches.append(self)

            def select(self, rows):
                super().select(rows)
                self.rows = [self.rows[row] for row in rows]

            def keep(self, paths):
                super().keep(paths)
                script.kept(self)

        def scripted(drafter, input_ids, features, num_tokens, cache, embedding=None, picks=None):
            whole = min(map(len, features)) > 0  # else the first pieces of long prompts
            logits = draft_rows(drafter, input_ids, features, num_tokens, cache, embedding, picks)
            if not whole:
                return logits
            self.drafts.append(len(features))
            self.look(drafter, logits, cache, embedding)
            return torch.stack([self.row(row, length, num_tokens) for row, length in zip(cache.rows, cache.lengths)])

        def counted(model, trees, *rest):
            self.batches.append(len(trees))
            return masks(model, trees, *rest)

        monkeypatch.setattr(batch_peagle, "BatchCache", Numbered)
        monkeypatch.setattr(batch_peagle, "draft_rows", scripted)
        monkeypatch.setattr(batch_peagle, "tree_masks", counted)

    def row(self, row, length, num_tokens):
        logits, plan = torch.zeros(num_tokens, VOCAB), self.plans[row % len(self.plans)]
        continuation = self.reference[row][self.padding[row] + length + 1 :] + [0] * num_tokens
        for depth in range(num_tokens):
            right = plan[self.drawn[row] % len(plan)]
            logits[depth, (continuation[depth] + (not right)) % VOCAB] = 6
            if self.wide and self.drawn[row] % 2:  # another token is more probable
                logits[depth, VOCAB - 2 - depth] = 6.5
            self.drawn[row] += 1
        return logits

    def kept(self, cache):
        pass

    def look(self, drafter, logits, cache, embedding):
        pass


def assert_greedy(monkeypatch, target, ids, options, **settings):
    """As plain decoding of the batch and of each row alone, with a random drafter and one right in some places."""
    expected, mask = plain(target, ids, **options), options["attention_mask"].bool()
    for row, own in enumerate(mask):
        alone = plain(target, ids[row : row + 1, own], max_new_tokens=options["max_new_tokens"])
        assert torch.equal(expected[row, int((~own).sum()) :], alone[0])
    drafter = make_drafter(target, num_hidden_layers=2)
    assert torch.equal(drafted(target, drafter, ids, **options, **settings), expected)
    with monkeypatch.context() as patch:
        Script(patch, expected, mask, wide=settings["draft_tree"] is not None)
        out = drafted(target, drafter, ids, return_dict_in_generate=True, **options, **settings)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.emitted) == len(ids) * (options["max_new_tokens"] - 1)
    assert sum(out.stats.accepted) > 3 or settings["draft_tree"] == 0
