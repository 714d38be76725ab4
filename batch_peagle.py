"""Several rows at once, each advancing by as many tokens as it accepts: one target and one drafter forward per round.

What is a rule stays where it is for one row: what is drafted (`propose`), what is accepted (`Continuation`), what a slot
holds and sees (`Drafter.slots`). Here is what lets rows of different lengths share a forward. A finished row leaves, so that
those that go on do not pay for it.
"""

import copy
import time

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import logits_process
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sliding_window_overlay


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .decoding_peagle import (
        DecodingStats,
        Draws,
        PEagleGenerateOutput,
        check_supported,
        position_limit,
        propose,
        rows_read,
        settle,
        vocabulary,
        with_lookup,
    )
    from .modeling_peagle_sequential import best
    from .sizing_peagle import Costs
    from .tree_peagle import DraftTree
    from .verification_peagle import GROWTH, Continuation, check_target
except ImportError:
    from decoding_peagle import (
        DecodingStats,
        Draws,
        PEagleGenerateOutput,
        check_supported,
        position_limit,
        propose,
        rows_read,
        settle,
        vocabulary,
        with_lookup,
    )
    from modeling_peagle_sequential import best
    from sizing_peagle import Costs
    from tree_peagle import DraftTree
    from verification_peagle import GROWTH, Continuation, check_target


# These count their own calls, one for each step of the whole batch.
STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)


class BatchCache(Cache):
    """Keys and values of rows of different lengths: those of row `b` are the first `lengths[b]` columns of each layer.

    Forwards write theirs behind the longest row, the same columns for all; then [`keep`] moves to the end of each row what
    that row accepted. Every layer keeps all columns, sliding ones too, and has room for more, which doubles when it is full:
    nothing is concatenated per step.
    """

    def __init__(self, batch: int):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.lengths = [0] * batch
        self.start = self.end = 0  # the columns of the last forward

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Writes the new `(batch, heads, new, head_dim)` keys and values; returns all columns up to them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(DynamicLayer())
        if layer_idx == 0:  # a round of a sequential drafter has several forwards
            self.start, self.end = self.end, self.end + key_states.shape[2]
        layer, start, end = self.layers[layer_idx], self.start, self.end
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
            layer.keys, layer.values = key_states[:, :, :0], value_states[:, :, :0]
        room = layer.keys.shape[2]
        if room < end:
            more = (0, 0, 0, max(room, end + GROWTH - room))
            layer.keys, layer.values = F.pad(layer.keys, more), F.pad(layer.values, more)
        layer.keys[:, :, start:end], layer.values[:, :, start:end] = key_states, value_states
        return layer.keys[:, :, :end], layer.values[:, :, :end]

    def keep(self, paths: list[list[int]]):
        """Of what was written since the last call, leave of each row the columns `paths[row]` (ascending), behind those it had."""
        start, most = max(self.lengths), max(map(len, paths))
        # Where a path is shorter than others, a column is moved to where it is.
        sources = [
            [*(start + node for node in path), *range(length + len(path), length + most)]
            for length, path in zip(self.lengths, paths)
        ]
        targets = [list(range(length, length + most)) for length in self.lengths]
        if sources != targets:
            for layer in self.layers:
                device = layer.keys.device
                row = torch.arange(len(paths), device=device)[:, None]
                source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
                for columns in (layer.keys, layer.values):
                    columns[row, :, target] = columns[row, :, source]
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]
        self.end = max(self.lengths)

    def select(self, rows: list[int]):
        """Leave these rows alone."""
        self.lengths = [self.lengths[row] for row in rows]
        self.end = max(self.lengths)
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def layer_windows(config) -> dict[str, int | None]:
    """The window of each kind of layer, None for full attention; one kind "" where all layers take the same mask.

    ValueError: A kind of layer whose mask is not known here.
    """
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "attention_chunk_size", None) is None:
        return {"": window}
    unknown = sorted(set(kinds or ["chunked_attention"]) - windows.keys())
    if unknown:
        raise ValueError(
            f"Decoding with a P-EAGLE drafter: a batch is not supported for layers of {', '.join(unknown)}: decode one prompt "
            "at a time."
        )
    return {kind: windows[kind] for kind in set(kinds)}


def tree_masks(model, trees: list[DraftTree], depths: torch.LongTensor, lengths: list[int]):
    """The attention masks of one forward over a tree per row, as the target takes them.

    A node sees what its row has read, and its ancestors; in sliding layers as far back as if its path alone had been read.

    Args:
        depths (`torch.LongTensor` of shape `(batch, nodes)`): Those of every node, root included, 0 where a tree is smaller.
        lengths (`list[int]`): Columns that each row of the [`BatchCache`] holds; the nodes' come behind the longest.

    Returns:
        `torch.Tensor` of shape `(batch, 1, nodes, columns)`, or one for each kind of layer where there are several.
    """
    size, start, device = depths.shape[1], max(lengths), model.device
    # What fills up a smaller tree sees itself and the text: nothing looks at it, but it must be finite.
    ancestors = torch.eye(size, dtype=torch.bool).repeat(len(trees), 1, 1)
    for block, tree in zip(ancestors, trees):
        block[: len(tree.depths), : len(tree.depths)] = tree.ancestors()
    length, columns = torch.tensor(lengths, device=device)[:, None], torch.arange(start, device=device)
    text = (columns < length)[:, None].expand(-1, size, -1)
    visible = torch.cat([text, ancestors.to(device)], dim=-1)
    # The place of each node and of each column in its row's text.
    node_place = length + depths.to(device)
    place = torch.cat([columns.expand(len(trees), -1), node_place], dim=-1)

    def mask(window: int | None) -> torch.Tensor:
        near = sliding_window_overlay(window or start + size)

        def sees(row, head, query, key):
            return visible[row, query, key] & near(row, head, node_place[row, query], place[row, key])

        return ALL_MASK_ATTENTION_FUNCTIONS[model.config.get_text_config()._attn_implementation](
            batch_size=len(trees),
            q_length=size,
            kv_length=start + size,
            mask_function=sees,
            allow_is_causal_skip=False,
            dtype=model.dtype,
            device=device,
        )

    masks = {kind: mask(window) for kind, window in layer_windows(model.config).items()}
    return masks.get("", masks)


def draft_rows(
    drafter, input_ids, features, num_tokens: int, cache: BatchCache, embedding=None, picks=None
) -> torch.Tensor:
    """[`Drafter.draft`] for several rows in one forward.

    Args:
        input_ids (`list[torch.LongTensor]`), features (`list[torch.Tensor]`): For each row as there, but features of shape
            `(verified, layers * target_hidden_size)`.
        picks (`list[Callable]`, *optional*): The `pick` of each row.

    Returns:
        `torch.Tensor` of shape `(batch, num_tokens, draft_vocab_size)`.
    """
    size = drafter.max_slots
    while any(len(unread) > size for unread in features):
        first = [size if len(unread) > size else 0 for unread in features]
        ids = [unread[: count + 1] for unread, count in zip(input_ids, first)]
        draft_rows(drafter, ids, [unread[:count] for unread, count in zip(features, first)], 1, cache, embedding)
        input_ids = [unread[count:] for unread, count in zip(input_ids, first)]
        features = [unread[count:] for unread, count in zip(features, first)]

    slots = [
        drafter.slots(ids, len(unread), cached, num_tokens)
        for ids, unread, cached in zip(input_ids, features, cache.lengths)
    ]
    sizes, cached = [len(slot_ids) for slot_ids, *_ in slots], max(cache.lengths)
    # Filled up in front, so that the slots to score are the last of every row. What fills up sees all, to be finite.
    layout = [pad_sequence(rows, batch_first=True, padding_side="left") for rows in list(zip(*slots))[:3]]
    visible = torch.ones(len(slots), max(sizes), cached + max(sizes), dtype=torch.bool, device=drafter.device)
    for row, ((*_, own), length, count) in enumerate(zip(slots, cache.lengths, sizes)):
        visible[row, max(sizes) - count :] = F.pad(own[:, length:], (cached + max(sizes) - count, 0))
        visible[row, max(sizes) - count :, :length] = own[:, :length]
    output = drafter(
        layout[0],
        pad_sequence(features, batch_first=True),
        *layout[1:],
        visible,
        embedding=embedding,
        cache=cache,
        rows=slice(-num_tokens, None),
        pick=lambda scores: torch.cat([pick(row[None]) for pick, row in zip(picks or [best] * len(scores), scores)]),
    )
    cache.keep([list(range(max(sizes) - count, max(sizes) - num_tokens + 1)) for count in sizes])
    return output.logits


def of_row(processor, row: int, batch: int):
    """The processor that does to one row alone what `processor` does to it in the batch."""
    own = copy.copy(processor)
    match processor:
        case logits_process.RepetitionPenaltyLogitsProcessor(prompt_ignore_length=torch.Tensor() as ignored):
            own.prompt_ignore_length = ignored[row : row + 1]
        case logits_process.EncoderRepetitionPenaltyLogitsProcessor(encoder_input_ids=prompts):
            own.encoder_input_ids = prompts[row * len(prompts) // batch][None]
        case logits_process.EncoderNoRepeatNGramLogitsProcessor(generated_ngrams=ngrams):
            own.generated_ngrams, own.batch_size = [ngrams[row * len(ngrams) // batch]], 1
        case logits_process.PrefixConstrainedLogitsProcessor(_prefix_allowed_tokens_fn=allowed, _num_beams=group):
            own._prefix_allowed_tokens_fn, own._num_beams = lambda _, ids: allowed(row // group, ids), 1
    return own


def check_batch(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs):
    """Refuse, by name, what would give another output than plain decoding of the batch."""
    check_target(model, model_kwargs, "decode a batch", "decode one prompt at a time")
    layer_windows(model.config)
    cache, attention_mask = model_kwargs["cache"], model_kwargs.get("attention_mask")
    hidden = torch.zeros_like(input_ids) if attention_mask is None else (attention_mask == 0).long()
    known = ("attention_mask", "position_ids", "token_type_ids", "pixel_values")
    unknown = [name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor) and name not in known]
    stateful = [type(processor).__name__ for processor in logits_processor if isinstance(processor, STATEFUL)]
    theirs = (logits_process.__name__, MaxLengthCriteria.__module__)
    own = [each for each in (*logits_processor, *stopping_criteria) if type(each).__module__ not in theirs]
    # What a class says of itself; of one that inherits it, nothing is known.
    own = [each for each in own if not vars(type(each)).get("supports_continuous_batching")]
    stops = [type(criterion).__name__ for criterion in stopping_criteria if type(criterion) is not MaxLengthCriteria]
    problems = {
        "The positions of a token are several: decode one prompt at a time.": model_kwargs["position_ids"].dim() != 2,
        "The attention mask hides a whole prompt: leave at least one token of each visible.": hidden.all(dim=1).any(),
        "The attention mask hides more than left padding: pad on the left, and hide nothing else.": (
            (hidden.diff(dim=1) > 0).any()
        ),
        "A batch is decoded in a cache of its own: pass no cache, and leave cache_implementation unset.": (
            type(cache) is not DynamicCache
            or cache.offloading
            or getattr(cache, "_is_user_defined", False)
            or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        ),
        "A streamer shows one row: decode one prompt at a time.": streamer is not None,
        "Of a batch it returns no scores or logits, as finished rows leave it: turn output_scores and output_logits off.": (
            generation_config.return_dict_in_generate
            and (generation_config.output_scores or generation_config.output_logits)
        ),
        f"{', '.join(stateful)} counts the steps of the whole batch, whose rows advance independently here: decode one prompt "
        "at a time.": stateful,
        f"{', '.join(type(each).__name__ for each in own)} is not of transformers and may count its calls or look at other rows, "
        "which advance independently here: decode one prompt at a time, or set supports_continuous_batching = True in the class "
        "of a processor that goes by each row's scores alone.": own,
        f"Without an EOS token, plain decoding goes on with a finished row until all are, which {', '.join(stops)} asks for: "
        "set eos_token_id, or decode one prompt at a time.": (
            stops and not any(isinstance(criterion, EosTokenCriteria) for criterion in stopping_criteria)
        ),
        f"A batch is decoded without {', '.join(unknown)}: decode one prompt at a time.": unknown,
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"Decoding with a P-EAGLE drafter: {problem}")


def decode_batch(
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
    """[`decode`] for several rows. Those that are done end in pad tokens, as in plain decoding.

    No cache is returned: plain decoding's holds what the target makes of the padding on either side, which it never reads
    here. None may be passed back all the same; the next call then reads the text anew.
    """
    check_supported(model, input_ids, generation_config, model_kwargs)
    check_batch(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    shape, sizer, warpers = settle(
        model, drafter, input_ids, logits_processor, generation_config, model_kwargs, num_tokens, shape, lookup, costs
    )
    stats, start = stats or DecodingStats(), time.perf_counter()
    batch, length = input_ids.shape
    every_text = texts = [
        Continuation(
            input_ids[row : row + 1],
            LogitsProcessorList(of_row(processor, row, batch) for processor in logits_processor),
            stopping_criteria,
            generation_config,
            None,
            stats.origins,
        )
        for row in range(batch)
    ]
    layer_ids = drafter.config.eagle_aux_hidden_state_layer_ids
    cache, draft_cache = BatchCache(batch), BatchCache(batch)
    embedding, draft_ids = vocabulary(drafter, model)
    end = min(stopping_criteria.max_length - 1, position_limit(model))

    model_kwargs |= {"cache": cache, "output_hidden_states": layer_ids}
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    rows_read(outputs.hidden_states[layer_ids[0]], input_ids)
    for text, logits in zip(texts, outputs.logits[:, -1:].to(input_ids.device, torch.float32)):
        text.accept(logits, DraftTree.chain([]))
    attention_mask = model_kwargs.pop("attention_mask", None)
    padding = [0] * batch if attention_mask is None else (attention_mask == 0).sum(dim=1).tolist()
    # The rows of the last forward that hold verified tokens.
    verified = [list(range(hidden, length)) for hidden in padding]
    # From a token's place in the cache to its position, which is counted on from the last one of the prompt.
    last = model_kwargs.pop("position_ids")[:, -1].tolist()
    shifts = [position + 1 - (length - hidden) for position, hidden in zip(last, padding)]
    token_types = model_kwargs.pop("token_type_ids", None)
    stats.prefill_seconds = time.perf_counter() - start

    features = [[] for _ in texts]  # what the drafter has not read yet
    with model._optimize_model_for_decode():
        while True:
            cache.keep(verified)
            states = [outputs.hidden_states[i] for i in layer_ids]
            for row, path in enumerate(verified if shape != 0 else []):
                features[row].append(torch.cat([state[row, path].to(drafter.device) for state in states], dim=-1))
            going = [row for row, text in enumerate(texts) if not text.stopped]
            if not going:
                break
            if len(going) < len(texts):
                texts, features, shifts = ([values[row] for row in going] for values in (texts, features, shifts))
                token_types = None if token_types is None else token_types[going]
                cache.select(going)
                draft_cache.select(going)

            unread_slots = max(sum(map(len, own)) for own in features)
            drafting, draft_time = sizer is None or sizer.drafts(unread_slots), 0.0
            wanted, trees = [min(num_tokens, end - text.length) for text in texts], [DraftTree.chain([])] * len(texts)
            if drafting and max(wanted) > 0 and shape != 0:
                read, features = [torch.cat(parts) for parts in features], [[] for _ in texts]
                unread = [text.sequence[0, -len(own) - 1 :].to(drafter.device) for text, own in zip(texts, read)]
                picks = [best if warpers is None else Draws(warpers, len(draft_ids)) for _ in texts]
                clock = time.perf_counter()
                draft_logits = draft_rows(drafter, unread, read, max(wanted), draft_cache, embedding, picks)
                draft_time = time.perf_counter() - clock
                draft_logits = draft_logits[..., : len(draft_ids)]
                trees = [
                    propose(drafter, logits[:depth], draft_ids, shape, pick) if depth > 0 else tree
                    for logits, depth, tree, pick in zip(draft_logits, wanted, trees, picks)
                ]
            if drafting and lookup:
                trees = [
                    with_lookup(tree, text, min(lookup, end - text.length), shape) if end > text.length else tree
                    for tree, text in zip(trees, texts)
                ]

            if sizer is not None:
                trees = [sizer.cut(tree) if tree.tokens or draft_time else tree for tree in trees]

            depths = pad_sequence([torch.tensor(tree.depths) for tree in trees], batch_first=True)
            newest = [text.sequence[0, -1:] for text in texts]
            nodes = [torch.cat([root, root.new_tensor(tree.tokens)]) for root, tree in zip(newest, trees)]
            places = torch.tensor([[shift + read] for shift, read in zip(shifts, cache.lengths)])
            inputs = model.prepare_inputs_for_generation(
                pad_sequence(nodes, batch_first=True),
                attention_mask=tree_masks(model, trees, depths, cache.lengths),
                position_ids=(places + depths).to(input_ids.device),
                token_type_ids=None if token_types is None else token_types[:, -1:].expand(depths.shape),
                **model_kwargs,
            )
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = depths.shape[1]
            clock = time.perf_counter()
            outputs = model(**inputs, return_dict=True)
            verify_time = time.perf_counter() - clock

            every = outputs.logits[:, -depths.shape[1] :].to(input_ids.device, torch.float32)
            for text, tree, logits in zip(texts, trees, every):
                accepted = text.accept(logits[: len(tree.depths)], tree)
                # Of the times of a forward, each row has its share.
                stats.record(tree, accepted, len(text.path), draft_time / len(texts), verify_time / len(texts))
            verified = [text.path for text in texts]
            if sizer is not None:
                sizer.record(trees, [len(path) for path in verified])

    longest = max(text.length for text in every_text)
    pad = generation_config._pad_token_tensor  # None where no row can end before the others
    pad = 0 if pad is None else int(pad)
    sequences = torch.cat([F.pad(text.sequence, (0, longest - text.length), value=pad) for text in every_text])
    stats.total_seconds = time.perf_counter() - start
    if not generation_config.return_dict_in_generate:
        return sequences
    return PEagleGenerateOutput(sequences=sequences, stats=stats)
