"""Verification: one target forward over a draft tree, the accept rule, and a cache that keeps the accepted path alone.

A node of the tree stands at the position of its depth and sees the sequence and its own ancestors, so that the target
reads every path as if it were the only one. The accept rule then walks from the root: at each node the target chooses its
own token, by argmax or by one draw from its processed distribution, and the walk goes on in the child that has it. Every
emitted token is the target's own choice, given a tree that does not depend on the choice: so the output has the target's
law for every drafter and every tree (speculative sampling with a one-hot proposal,
https://huggingface.co/papers/2211.17192); and as one token is drawn per position, in order, a seeded run gives the very
tokens that plain sampling gives.
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


class Continuation:
    """The sequence being written, with the accept rule and everything `generate` promises for each token.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, length)`): The prompt.
        logits_processor, stopping_criteria, generation_config, streamer: As `generate` prepared them.
    """

    def __init__(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer):
        self.length = input_ids.shape[1]
        self.buffer = F.pad(input_ids.long(), (0, GROWTH))
        self.logits_processor, self.stopping_criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.do_sample = generation_config.do_sample
        returns = generation_config.return_dict_in_generate
        self.scores = () if returns and generation_config.output_scores else None
        self.logits = () if returns and generation_config.output_logits else None
        self.stopped, self.path = False, []

    @property
    def sequence(self) -> torch.LongTensor:
        """All tokens so far, shape `(1, length)`."""
        return self.buffer[:, : self.length]

    def accept(self, logits: torch.Tensor, tree: DraftTree) -> int:
        """The accept rule: emit the target's own token at each node, and go on where it is drafted.

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
                if self.do_sample:
                    token = torch.multinomial(scores.softmax(dim=-1), num_samples=1).item()
                else:
                    token = scores.argmax(dim=-1).item()
            else:
                token = greedy[node]
            if self.scores is not None:
                self.scores += (scores,)
            self.emit(token)
            node = tree.children(node).get(token)
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
