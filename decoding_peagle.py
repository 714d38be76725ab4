"""The decoding loop: each round drafts in one drafter forward and verifies, a chain or a tree, in one target forward.

`generate` runs [`decode`] after its own preparations. Why the output stays the target's own is told where it is decided
(`verification_peagle.py`).
"""

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticIndexedLayer,
)
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .modeling_peagle_sequential import best
    from .sizing_peagle import Costs, Sizer, costs_of, history_of
    from .tree_peagle import DraftTree, NoLaw, best_first, candidates, prompt_lookup, static_tree, with_branch
    from .verification_peagle import Continuation, check_cache, check_target, keep_path, spread, verifies_trees
except ImportError:
    from modeling_peagle_sequential import best
    from sizing_peagle import Costs, Sizer, costs_of, history_of
    from tree_peagle import DraftTree, NoLaw, best_first, candidates, prompt_lookup, static_tree, with_branch
    from verification_peagle import Continuation, check_cache, check_target, keep_path, spread, verifies_trees


# How likely a token is taken to be right that followed the same tokens before.
LOOKUP_PROBABILITY = 0.7
# The processors that look at the scores alone, and not at which token has which: they suit the drafter's scores as well.
WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
# Candidates per depth, at least, that a Markov head brings into its own order.
RERANKED = 16


@dataclass
class DecodingStats:
    """What happened in one call. Times are wall-clock seconds on the host, without waiting for an accelerator.

    Of a batch, the rounds of all rows are listed, those of one forward in the order of the rows.

    drafted (`list[int]`): Depths drafted per round (a round is one target forward after the prefill).
    nodes (`list[int]`): Draft tokens per round; of a chain as many as depths.
    accepted (`list[int]`): Draft tokens kept per round. A round emits one token more than it keeps, unless it is the last.
    emitted (`list[int]`): Tokens emitted per round. The prefill's first token belongs to no round.
    origins (`list[int | None]`): Of each new token, the depth that drafted it (0 is the first), or None for the target's own,
        as the prefill's is. It is there before a streamer gets the token.
    draft_times, verify_times (`list[float]`): Seconds per round in the drafter's and in the target's forward.
    """

    drafted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    origins: list[int | None] = field(default_factory=list)
    draft_times: list[float] = field(default_factory=list)
    verify_times: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0

    def record(self, tree: DraftTree, accepted: int, emitted: int, draft_time: float, verify_time: float):
        self.drafted.append(max(tree.depths))
        self.nodes.append(len(tree.tokens))
        self.accepted.append(accepted)
        self.emitted.append(emitted)
        self.draft_times.append(draft_time)
        self.verify_times.append(verify_time)

    def __add__(self, other: "DecodingStats") -> "DecodingStats":
        return DecodingStats(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def tau(self) -> float:
        """Acceptance length: tokens emitted per target forward, the target's own token included, prefill excluded."""
        return sum(self.emitted) / max(len(self.emitted), 1)

    @property
    def draft_seconds(self) -> float:
        return sum(self.draft_times)

    @property
    def verify_seconds(self) -> float:
        return sum(self.verify_times)

    @property
    def host_seconds(self) -> float:
        """Decoding time outside the forwards of the two models."""
        return self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    def depth_counts(self, depth: int) -> tuple[int, int]:
        """`(kept, tried)`: rounds that kept more than `depth` draft tokens, and rounds that drafted at all.

        Their ratio is the joint acceptance at `depth` (0 is the first). Rounds that did not draft so deep count as well, so
        that it falls with depth, and those of all depths add up to the drafts that such a round keeps.
        """
        return sum(kept > depth for kept in self.accepted), sum(drafted > 0 for drafted in self.drafted)

    def judged(self, depth: int) -> int:
        """Rounds whose draft tokens at `depth` were looked at: all before it were kept and no stop came first."""
        return sum(drafted > depth and emitted > depth for drafted, emitted in zip(self.drafted, self.emitted))


@dataclass
class PEagleGenerateOutput(GenerateDecoderOnlyOutput):
    """[`~generation.GenerateDecoderOnlyOutput`] with the [`DecodingStats`] of the call. Of a batch, `cache` is None."""

    stats: DecodingStats | None = None


def position_limit(model) -> float:
    return getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)  # ALiBi knows none


def check_supported(model, input_ids, generation_config, model_kwargs):
    """Refuse, by name, what would give another output than plain decoding."""
    limit = position_limit(model)
    cache, attention_mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
    mode = generation_config.get_generation_mode()
    problems = {
        "It does not search beams: set num_beams=1.": generation_config.num_beams not in (None, 1),
        f"It decodes greedily or by sampling, but the settings ask for {mode.value}: unset what does.": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        "It needs the cache: leave use_cache at True.": not generation_config.use_cache,
        "It starts from token ids: pass input_ids, not inputs_embeds.": model_kwargs.get("inputs_embeds") is not None,
        "The prompt is empty: pass at least one token.": input_ids.shape[1] == 0,
        "The attention mask hides the whole prompt: leave at least one token visible.": (
            attention_mask is not None and not attention_mask.any()
        ),
        f"The prompt has {input_ids.shape[1]} tokens, the target's limit is {limit}: shorten it.": (
            input_ids.shape[1] > limit
        ),
        "It does not return attentions or hidden states: turn output_attentions and output_hidden_states off.": (
            generation_config.return_dict_in_generate
            and (generation_config.output_attentions or generation_config.output_hidden_states)
        ),
        "It reads the prompt in one forward: leave prefill_chunk_size at None.": (
            generation_config.prefill_chunk_size is not None
        ),
        "The sparse attention of this target chooses by an indexer, which ranks several tokens at once otherwise than one by "
        "one: decode it without a drafter.": (
            cache is not None
            and any(isinstance(layer, (DynamicIndexedLayer, StaticIndexedLayer)) for layer in cache.layers)
        ),
        f"The {type(cache).__name__} of this target cannot forget rejected tokens: use the default dynamic cache, and a "
        "target without recurrent layers.": (cache is None or not cache.is_croppable),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"Decoding with a P-EAGLE drafter: {problem}")


def vocabulary(drafter, model) -> tuple[torch.Tensor | None, torch.LongTensor]:
    """The target's embedding table unless the drafter has its own, and the target ids of the usable draft vocabulary."""
    table = model.get_input_embeddings().weight
    embedding = None if drafter.config.own_embeddings else table.to(drafter.device)
    # A full draft vocabulary may be padded beyond the target's; the ids ascend, so the usable ones come first.
    draft_ids = drafter.draft_ids()
    return embedding, draft_ids[draft_ids < table.shape[0]]


def settle(
    model, drafter, input_ids, logits_processor, generation_config, model_kwargs, num_tokens, shape, lookup, costs
):
    """What `draft_tree` comes to for this target: a shape for [`propose`], the [`Sizer`] of `"auto"` and the `warpers` of a
    chain that is drawn, the latter two None otherwise. ValueError: The target cannot verify a tree that was asked for.
    """
    trees = bool(shape or lookup)
    if shape == "auto" and not lookup:
        trees = verifies_trees(model, model_kwargs, model_kwargs["cache"])
    if trees:
        check_target(model, model_kwargs)
        check_cache(model_kwargs["cache"])
    if shape == "auto":
        batch, clocked = len(input_ids), costs is None
        known = (costs or costs_of(model, drafter)).of_batch(batch)
        sizer = Sizer(known, num_tokens, clocked, history_of(model, drafter, batch, clocked, bool(lookup)))
        if trees or not sizer.most:
            return sizer.most, sizer, None
        return [(0,) * depth for depth in range(1, num_tokens + 1)], sizer, None
    if not generation_config.do_sample or shape is not None or lookup:
        return shape, None, None
    return shape, None, LogitsProcessorList(each for each in logits_processor if type(each) in WARPERS)


class Draws:
    """Picks the tokens of one chain by a draw each, from the drafter's law of `size` tokens as `warpers` warp it, and keeps
    `tokens` and `laws`, those of each call."""

    def __init__(self, warpers: LogitsProcessorList, size: int):
        self.warpers, self.size, self.tokens, self.laws = warpers, size, [], []

    def __call__(self, scores: torch.Tensor) -> torch.LongTensor:
        scores = scores[:, : self.size].to(torch.promote_types(scores.dtype, torch.float32))
        # A drafter whose scores give no law (as NaN does not) drafts one token for certain; that is a law, too.
        certain = F.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores.dtype).log()
        scores = torch.where(scores.amax(dim=-1, keepdim=True).isfinite(), scores, certain)
        self.laws.append(self.warpers(None, scores).softmax(dim=-1))
        self.tokens.append(torch.multinomial(self.laws[-1], num_samples=1)[:, 0])
        return self.tokens[-1]


def draw_chain(drafter, logits: torch.Tensor, draft_ids: torch.LongTensor, pick: Draws) -> DraftTree:
    """A chain that is drawn from the drafter's law, warped as the target's is; for the arguments see [`propose`]."""
    left = logits[len(pick.tokens) :]  # a sequential drafter has drawn the others already
    if len(left):
        drafter.choose(left, pick)
    tokens, laws = (torch.cat(parts)[: len(logits)] for parts in (pick.tokens, pick.laws))
    return DraftTree.chain(draft_ids[tokens].tolist(), laws=(draft_ids, laws))


def propose(drafter, logits: torch.Tensor, draft_ids: torch.LongTensor, shape, pick=best) -> DraftTree:
    """The draft tokens of one round.

    Args:
        logits (`torch.Tensor` of shape `(K, len(draft_ids))`): The drafter's scores.
        draft_ids (`torch.LongTensor`): The target ids of their columns.
        shape (`int` or `list[tuple[int, ...]]`, *optional*): See [`speculative_generate`].
        pick (`Callable`): [`Draws`] for a chain that is drawn, those that [`Drafter.draft`] picked by.
    """
    if isinstance(pick, Draws):
        return draw_chain(drafter, logits.float(), draft_ids, pick)
    if shape is None:
        return DraftTree.chain(draft_ids[drafter.choose(logits)].tolist())
    transition = drafter.markov_head.between if drafter.config.markov_rank else None
    law = {"temperatures": drafter.config.draft_temperatures, "transition": transition}
    try:
        paths, ranks = [], shape
        if not isinstance(shape, int):
            paths = [path for path in shape if len(path) <= len(logits)]
            ranks = max((rank for path in paths for rank in path), default=0) + 1
            if transition is not None:
                ranks = max(ranks, RERANKED)
        found = candidates(logits, ranks, draft_ids, **law)
        if not drafter.config.parallel_drafting:
            found.behind_best()
        return best_first(found, shape) if isinstance(shape, int) else static_tree(paths, found)
    except NoLaw:  # a drafter that overflowed drafts nothing; the target decodes on
        return DraftTree.chain([])


def with_lookup(tree: DraftTree, text: Continuation, num_tokens: int, shape) -> DraftTree:
    """`tree` with what followed the newest tokens of `text` before, `num_tokens` at most; see [`propose`] for `shape`."""
    branch = prompt_lookup(text.sequence[0].tolist(), num_tokens)
    most = shape if isinstance(shape, int) else len(tree.tokens) + len(branch)
    return with_branch(tree, branch, math.log(LOOKUP_PROBABILITY), most)


def rows_read(hidden_states: torch.Tensor, input_ids: torch.LongTensor) -> int:
    """How many rows the target read in the prefill: the prompt's, or fewer where the cache held some. ValueError if more."""
    rows = hidden_states.shape[1]
    if rows > input_ids.shape[1]:
        raise ValueError(
            f"Decoding with a P-EAGLE drafter: the target read {rows} rows for {input_ids.shape[1]} tokens. A learned prompt "
            "(prompt tuning) is not supported; merge the adapter or disable it."
        )
    return rows


def decode(
    model,
    input_ids: torch.LongTensor,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter,
    num_tokens: int,
    shape=None,
    lookup: int = 0,
    costs: Costs | None = None,
    streamer=None,
    stats: DecodingStats | None = None,
    **model_kwargs,
):
    """The decoding loop that `generate` runs after its preparations (`custom_generate` as a callable)."""
    check_supported(model, input_ids, generation_config, model_kwargs)
    shape, sizer, warpers = settle(
        model, drafter, input_ids, logits_processor, generation_config, model_kwargs, num_tokens, shape, lookup, costs
    )
    stats, start = stats or DecodingStats(), time.perf_counter()
    text = Continuation(input_ids, logits_processor, stopping_criteria, generation_config, streamer, stats.origins)
    layer_ids = drafter.config.eagle_aux_hidden_state_layer_ids
    draft_cache = DynamicCache()
    embedding, draft_ids = vocabulary(drafter, model)

    def last_logits(outputs, count: int) -> torch.Tensor:
        return outputs.logits[0, -count:].to(input_ids.device, torch.float32)

    model_kwargs["output_hidden_states"] = layer_ids
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    # The rows of the last forward that hold verified tokens: here all but left padding.
    rows = rows_read(outputs.hidden_states[layer_ids[0]], input_ids)
    attention_mask = model_kwargs.get("attention_mask")
    verified = slice(0 if attention_mask is None else int((attention_mask[0, -rows:] == 0).sum()), rows)
    text.accept(last_logits(outputs, 1), DraftTree.chain([]))
    stats.prefill_seconds = time.perf_counter() - start

    cache, pending = outputs.cache, []  # features that the drafter has not read yet
    # The last token that may still come needs no draft, and tables of learned positions end, though the text may before.
    end = min(stopping_criteria.max_length - 1, position_limit(model))
    if isinstance(cache, StaticCache):  # it may end before, and hold more than the text
        end = min(end, cache.get_max_length() - int(cache.get_seq_length()) + text.length - 1)
    with model._optimize_model_for_decode(), recording_past(cache):
        while not text.stopped:
            model_kwargs = model._update_model_kwargs_for_generation(
                outputs, model_kwargs, num_new_tokens=len(text.path)
            )

            wanted, tree, draft_time = min(num_tokens, end - text.length), DraftTree.chain([]), 0.0
            if shape != 0:
                states = [outputs.hidden_states[i][:, verified].to(drafter.device) for i in layer_ids]
                pending.append(torch.cat(states, dim=-1))
            unread_slots = sum(part.shape[1] for part in pending)
            drafting = sizer is None or sizer.drafts(unread_slots)
            # No features come from a prompt of which all new tokens are masked.
            if drafting and wanted > 0 and unread_slots:
                features, pending = torch.cat(pending, dim=1), []
                unread = text.sequence[0, -features.shape[1] - 1 :].to(drafter.device)
                pick = best if warpers is None else Draws(warpers, len(draft_ids))
                clock = time.perf_counter()
                draft_logits = drafter.draft(unread, features, wanted, draft_cache, embedding, pick)
                draft_time = time.perf_counter() - clock
                tree = propose(drafter, draft_logits[:, : len(draft_ids)], draft_ids, shape, pick)
            if drafting and lookup and end > text.length:
                tree = with_lookup(tree, text, min(lookup, end - text.length), shape)
            if sizer is not None and (tree.tokens or draft_time):
                tree = sizer.cut(tree)
            if not tree.is_chain:
                tree = tree.first(check_cache(cache))

            depth, size = max(tree.depths), len(tree.tokens) + 1
            chain = torch.cat([text.sequence, text.sequence.new_tensor([tree.tokens[:depth]])], dim=1)
            inputs = model.prepare_inputs_for_generation(
                chain,
                next_sequence_length=depth + 1,
                **model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=depth),
            )
            if not tree.is_chain:
                inputs = spread(model, inputs, tree, cache)
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = size
            clock = time.perf_counter()
            outputs = model(**inputs, return_dict=True)
            verify_time = time.perf_counter() - clock

            before = text.length
            try:
                accepted = text.accept(last_logits(outputs, size), tree)
            finally:
                # Both caches keep what was read and accepted: everything but the newest token. That holds when a processor,
                # a criterion or a streamer raises, too, for the cache may be the user's.
                keep_path(cache, text.path[: max(text.length - before, 1)], size)
            verified = text.path
            stats.record(tree, accepted, len(text.path), draft_time, verify_time)
            if sizer is not None:
                sizer.record([tree], [len(text.path)])

    if streamer is not None:
        streamer.end()
    stats.total_seconds = time.perf_counter() - start
    if not generation_config.return_dict_in_generate:
        return text.sequence.clone()
    return PEagleGenerateOutput(
        sequences=text.sequence.clone(), scores=text.scores, logits=text.logits, cache=cache, stats=stats
    )


@contextmanager
def recording_past(cache):
    """Sliding layers keep what falls out of their window until the next `crop`, so that rejected tokens can be undone.

    Not before the prefill is read: a recording layer keeps all of it, and nothing of the prompt is rejected.
    """
    layers = [
        layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past
    ]
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in layers:
            layer.record_past = False
