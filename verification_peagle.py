"""Verification: one target forward over a draft tree, the accept rule, and a cache that keeps the accepted path alone.

A node of the tree stands at the position of its depth and sees the sequence and its own ancestors, so that the target
reads every path as if it were the only one. The accept rule then walks from the root: at each node one token is emitted,
and the walk goes on in the child that has it. How the token is chosen depends on how the drafts were:

- Greedy, it is the target's argmax.
- A tree is sampled by one draw from the target's processed distribution per node. Every token is the target's own choice,
  given a tree that does not depend on the choice, so the output has the target's law for every drafter and every tree; and
  as one token is drawn per position, in order, a seeded run gives the very tokens that plain sampling gives.
- A chain that was drawn from the drafter's own distribution is sampled by [`ratio_test`], which keeps more. The law is the
  target's again, but not the tokens of the same seed.
"""

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.masking_utils import create_masks_for_generate


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .tree_peagle import DraftTree
except ImportError:
    from tree_peagle import DraftTree


# Room for new tokens at the start; it doubles when it is used up.
GROWTH = 512
# What always goes instead of a tree.
CHAIN = "draft a chain, without draft_tree and prompt_lookup_num_tokens"


def spread(model, inputs: dict, tree: DraftTree, cache: Cache) -> dict:
    """The inputs of a forward over the root and the nodes of a tree.

    Args:
        inputs (`dict`): What `prepare_inputs_for_generation` gives for the root and any chain as long as the tree is deep.
        cache (`Cache`): What the target has read before the root.

    Returns:
        `dict`: The same with a row per node, which has all that the chain's row of its depth has, but another token, and of
        the drafts sees its ancestors alone.

    """
    device, length = inputs["input_ids"].device, inputs["input_ids"].shape[1]
    depths = torch.tensor(tree.depths, device=device)
    masks = inputs.get("attention_mask")
    if masks is None or isinstance(masks, torch.Tensor) and masks.dim() == 2:
        masks = create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.empty((1, length, 0), dtype=model.dtype, device=device),
            attention_mask=masks,
            cache=cache,
        )
    ancestors, read = tree.ancestors().to(device), int(cache.get_seq_length())

    def spread_mask(mask: torch.Tensor) -> torch.Tensor:
        # Dynamic caches end where the new rows begin, static ones hold room for more, sliding ones less than was read.
        start = min(read, mask.shape[-1] - length)
        rows = mask[..., depths, :]
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        block = rows[..., start + depths].masked_fill(~ancestors, hidden)
        return torch.cat([rows[..., :start], block, rows[..., start + len(depths) :]], dim=-1)

    spreadable = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    rows = {name: value[..., depths] for name, value in spreadable.items() if value.shape[-1:] == (length,)}
    nodes = torch.tensor([tree.tokens], device=device)
    masks = (
        {kind: spread_mask(mask) for kind, mask in masks.items()} if isinstance(masks, dict) else spread_mask(masks)
    )
    return (
        inputs | rows | {"input_ids": torch.cat([inputs["input_ids"][:, :1], nodes], dim=1), "attention_mask": masks}
    )


def keep_path(cache: Cache, path: list[int], size: int):
    """Leave of the newest `size` rows of every layer those at `path` (ascending), as if they alone had been read.

    Keys need no other rotation: they stand at the positions of their depths.
    """
    if path != list(range(len(path))):
        for layer in cache.layers:
            # A static layer has room behind what was read.
            end = layer.get_seq_length() if isinstance(layer, StaticLayer) else layer.keys.shape[-2]
            first = int(end) - size
            for rows in (layer.keys, layer.values):
                chosen = torch.tensor(path, device=rows.device) + first
                rows[:, :, first : first + len(path)] = rows[:, :, chosen]
    cache.crop(len(path) - size)


def check_target(model, inputs: dict, task: str = "verify a tree", instead: str = CHAIN):
    """Refuse a target that would read the nodes of a tree, or several rows at once, wrongly.

    Args:
        inputs (`dict`): What `generate` prepared for the first forward.
        task (`str`), instead (`str`): What is asked of the target, and what to do without.

    Raises:
        ValueError: The target counts its positions itself, or its attention takes no mask (flash attention), or does not go
            through the interface of transformers and so may make its own (by the number of the row, as GPT-Neo's window).
    """
    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"Decoding with a P-EAGLE drafter: the attention {attention!r} of this target cannot {task}. Load the target "
            f'with attn_implementation="sdpa", or {instead}.'
        )
    if inputs.get("position_ids") is None or not model._supports_attention_backend:
        raise ValueError(
            f"Decoding with a P-EAGLE drafter: {type(model).__name__} cannot {task}, as its positions or its attention mask "
            f"cannot be given: {instead}."
        )


def check_cache(cache: Cache) -> int | None:
    """How many nodes a tree may have beside its root, which is what static layers have room for; None if any number.

    Raises:
        ValueError: A layer of the cache cannot give back single rows, which a tree asks for; it is named.
    """
    for layer in cache.layers:
        # Their subclasses keep more than keys and values, such as the keys of an indexer, which would stay where they were.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer):
            raise ValueError(
                f"Decoding with a P-EAGLE drafter: the {type(layer).__name__} of this target's cache cannot give back single "
                "rows of a tree: draft a chain."
            )
    static = [layer.get_max_length() for layer in cache.layers if isinstance(layer, StaticLayer)]
    return max(min(static) - int(cache.get_seq_length()) - 1, 0) if static else None


def verifies_trees(model, inputs: dict, cache: Cache) -> bool:
    """Whether [`check_target`] and [`check_cache`] would both pass."""
    try:
        check_target(model, inputs)
        check_cache(cache)
    except ValueError:
        return False
    return True


def draw(law: torch.Tensor) -> int:
    """One draw from weights `(n,)` that are not negative; as with plain sampling, RuntimeError if they hold NaN."""
    return torch.multinomial(law, num_samples=1).item()


def ratio_test(p: torch.Tensor, q: torch.Tensor, token: int) -> int:
    """Speculative sampling (https://huggingface.co/papers/2211.17192): a token of law `p`, given a draw `token` from `q`.

    The draw is kept with probability `min(1, p / q)`; else the token comes from what `p` has more than `q`. So it is kept
    with probability `sum(min(p, q))`, which no rule exceeds that looks at one position. Block verification
    (https://huggingface.co/papers/2403.10444) looks at all of them and keeps more, but calls logits processors for positions
    that are not emitted, and those may keep a state.

    Args:
        p, q (`torch.Tensor` of shape `(vocab_size,)`): The target's distribution and the drafter's.
    """
    keep = (p[token] / q[token]).clamp(max=1)
    if draw(torch.stack([keep, 1 - keep])) == 0:
        return token
    rest = (p - q).clamp(min=0)
    # If nothing is left, p and q are the same up to rounding: a rejection is then just as improbable, and any token will do.
    return draw(rest if rest.any() else p)


def sample(scores: torch.Tensor, tree: DraftTree, node: int) -> int:
    """The token after `node`, given the target's processed `scores` `(vocab_size,)` there."""
    p = scores.softmax(dim=-1)
    if tree.laws is None or node == len(tree.tokens):
        return draw(p)
    ids, laws = tree.laws
    q = torch.zeros_like(p).index_copy_(0, ids.to(p.device), laws[node].to(p))
    return ratio_test(p, q, tree.tokens[node])


class Continuation:
    """The sequence being written, with the accept rule and everything `generate` promises for each token.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, length)`): The prompt.
        logits_processor, stopping_criteria, generation_config, streamer: As `generate` prepared them.
        origins (`list[int | None]`, *optional*): Gets the depth that drafted each token, or None for the target's own.
    """

    def __init__(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, origins=None):
        self.length = input_ids.shape[1]
        self.buffer = F.pad(input_ids.long(), (0, GROWTH))
        self.logits_processor, self.stopping_criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.do_sample = generation_config.do_sample
        returns = generation_config.return_dict_in_generate
        self.scores = () if returns and generation_config.output_scores else None
        self.logits = () if returns and generation_config.output_logits else None
        self.stopped, self.path = False, []
        self.origins = [] if origins is None else origins

    @property
    def sequence(self) -> torch.LongTensor:
        """All tokens so far, shape `(1, length)`."""
        return self.buffer[:, : self.length]

    def accept(self, logits: torch.Tensor, tree: DraftTree) -> int:
        """The accept rule: emit a token of the target's law at each node, and go on where it is drafted.

        Args:
            logits (`torch.Tensor` of shape `(N + 1, vocab_size)`): The target's float32 logits at the root and every node.
            tree (`DraftTree`): The draft tokens.

        Returns:
            `int`: How many of the emitted tokens were drafted. `path` has the nodes that were visited, from the root on,
            one for each emitted token; `stopped` tells whether a criterion was met; nothing follows it.
        """
        # Without processors a greedy choice needs no history: one transfer brings all of them.
        greedy = logits.argmax(dim=-1).tolist() if not (self.do_sample or self.logits_processor) else None
        self.path, node = [], 0
        while True:
            self.path.append(node)
            scores = logits[None, node]
            if self.logits is not None:
                self.logits += (scores,)
            if greedy is None:
                # Processors may write into their input, and they see the history of this very path.
                scores = self.logits_processor(self.sequence, scores.clone())
                token = sample(scores[0], tree, node) if self.do_sample else scores.argmax(dim=-1).item()
            else:
                token = greedy[node]
            if self.scores is not None:
                self.scores += (scores,)
            node = tree.children(node).get(token)
            self.origins.append(None if node is None else len(self.path) - 1)
            self.emit(token)
            if self.stopped or node is None:
                return len(self.path) - (node is None)

    def emit(self, token: int):
        if self.length == self.buffer.shape[1]:  # not sized by max_length, which may be far away
            self.buffer = F.pad(self.buffer, (0, self.length))
        self.buffer[0, self.length] = token
        self.length += 1
        # In the order of plain decoding, for criteria that look at the streamer.
        self.stopped = bool(self.stopping_criteria(self.sequence, self.scores).all())
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))  # a view of the buffer would go on changing
