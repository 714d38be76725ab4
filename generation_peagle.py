"""Speculative decoding with a P-EAGLE drafter through `target.generate(..., assistant_model=drafter)`.

Here the options of a call are resolved and checked; the loop that decodes is in `decoding_peagle.py`, that of several rows in
`batch_peagle.py`, and the engine, which loads the pair and takes text and chats, in `inference_peagle.py`.
"""

import functools

from transformers import StoppingCriteriaList, StopStringCriteria


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .batch_peagle import decode_batch
    from .decoding_peagle import DecodingStats, decode
    from .inference_peagle import PEAGLEInference
    from .sizing_peagle import Costs
    from .tree_peagle import checked_paths
except ImportError:
    from batch_peagle import decode_batch
    from decoding_peagle import DecodingStats, decode
    from inference_peagle import PEAGLEInference
    from sizing_peagle import Costs
    from tree_peagle import checked_paths


# Whose masks take 16 MB as booleans.
MOST_DRAFTS = 4096

__all__ = ["PEAGLEInference", "speculative_generate"]


def speculative_generate(
    drafter,
    target,
    generation_config=None,
    stopping_criteria=None,
    streamer=None,
    tokenizer=None,
    generate=None,
    draft_costs: Costs | dict | None = None,
    stats: DecodingStats | None = None,
    **kwargs,
):
    """`target.generate` with this drafter, whether attached or not. Takes (by name) and returns what `generate` does.

    With `return_dict_in_generate=True` the result also carries `stats`. `num_assistant_tokens` sets K, the depth of drafts,
    `prompt_lookup_num_tokens` the length of a further branch that repeats what followed the same tokens before. `generate`
    is the function to go through, the target's own method if unset.

    With `do_sample` the output has the law of plain sampling. With a `draft_tree`, a list of one path included, and with
    `prompt_lookup_num_tokens` the same seed also gives one prompt the same tokens; a chain is drawn from the drafter's own law, which
    keeps more drafts and uses the random numbers otherwise.

    Args:
        draft_tree (`int`, `list[tuple[int, ...]]` or `"auto"`, *optional*): Draft tokens per round: the so many most probable
            ones, or those of a fixed tree, by the ranks along the path to each (see [`static_tree`]), or as many of the most
            probable ones as pay (see [`Sizer`]), of which a target that cannot verify trees gets a chain. If unset, a chain
            of K where that is set, and else `"auto"`; None says so where a generation config says otherwise.
        draft_costs (`Costs` or its fields in a `dict`, *optional*): What `"auto"` reckons with; measured at the first use of
            this target with this drafter if unset, which takes a second or two.
        stats ([`DecodingStats`], *optional*): A fresh one, which the call fills while it decodes: a streamer that has it too
            knows from its `origins` where each token came from.

    Raises:
        ValueError: An option that cannot be decoded speculatively without changing the output; the message names it.
    """
    drafter.config.check_target(target)
    # In the order in which `generate` resolves them; its own defaults at the end are meant for other assistants.
    sources = {
        "the call": kwargs,
        "the generation_config": vars(generation_config) if generation_config is not None else {},
        "the target's generation_config": vars(target.generation_config),
        "the drafter's config": {"num_assistant_tokens": drafter.config.speculation_depth},
    }

    def setting(name):
        found = ((values[name], source) for source, values in sources.items() if values.get(name) is not None)
        return next(found, (None, None)) if kwargs.get(name, ...) is not None else (None, "the call")

    if kwargs.get("num_assistant_tokens", ...) is None:
        del kwargs["num_assistant_tokens"]
    draft_tree, _ = setting("draft_tree")
    kwargs.pop("draft_tree", None)
    num_tokens, source = setting("num_assistant_tokens")
    if source == "the drafter's config" and draft_tree in (None, "auto"):
        num_tokens, draft_tree = drafter.config.sized_depth, "auto"
    drafter.config.check_depth("num_assistant_tokens", num_tokens, source)
    lookup, source = setting("prompt_lookup_num_tokens")
    if lookup is not None and (type(lookup) is not int or lookup < 0):
        raise ValueError(f"prompt_lookup_num_tokens is {lookup!r} in {source}: pass a number of tokens, or None.")
    kwargs["prompt_lookup_num_tokens"] = None  # for another way of decoding, if it stays
    if isinstance(draft_tree, (list, tuple)):
        usable = int((drafter.draft_ids() < target.get_input_embeddings().weight.shape[0]).sum())
        draft_tree = checked_paths(draft_tree, drafter.config.num_depths, usable)
        num_tokens = max(map(len, draft_tree), default=0)
    elif draft_tree not in (None, "auto") and (type(draft_tree) is not int or draft_tree < 0):
        raise ValueError(
            f"draft_tree is {draft_tree!r}: pass how many tokens to draft per round, a list of paths such as "
            '[(0,), (1,), (0, 0)], or "auto".'
        )
    elif isinstance(draft_tree, int) and draft_tree > MOST_DRAFTS:
        raise ValueError(
            f"draft_tree is {draft_tree}: pass at most {MOST_DRAFTS}, as the memory that the masks of a tree take grows with the "
            "square of its size."
        )
    if draft_costs is not None and not isinstance(draft_costs, Costs):
        try:
            draft_costs = Costs(**draft_costs)
        except (TypeError, IndexError) as error:
            raise ValueError(
                f'draft_costs is {draft_costs!r}: pass seconds such as {{"rows": [1, 8], "target": [0.05, 0.06], "draft": 0.004}}.'
            ) from error
    for name, fix in (("token_healing", "heal the prompt before"), ("speculation_type", "unset it")):
        value, source = setting(name)
        if value:
            raise ValueError(f"Decoding with a P-EAGLE drafter: {name} is set in {source} and not supported; {fix}.")
    if kwargs.get("synced_gpus"):
        raise ValueError("Decoding with a P-EAGLE drafter: synced_gpus is not supported; leave it unset.")
    # `generate` keeps the tokenizer from a custom decoding loop, so the criterion that needs it is built here.
    stop_strings, _ = setting("stop_strings")
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: pass `tokenizer=` to generate as well.")
        stopping_criteria = StoppingCriteriaList(stopping_criteria or [])
        # As in `generate`, a criterion of the user's takes the place of the one of the same kind.
        if all(type(criterion) is not StopStringCriteria for criterion in stopping_criteria):
            stopping_criteria.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stop_strings"] = None
    generate = generate or functools.partial(type(target).generate, target)
    return generate(
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        streamer=streamer,
        custom_generate=functools.partial(
            decode_rows,
            drafter=drafter,
            num_tokens=num_tokens,
            shape=draft_tree,
            lookup=lookup or 0,
            costs=draft_costs,
            streamer=streamer,
            stats=stats,
        ),
        **kwargs,
    )


def decode_rows(model, input_ids, **options):
    """The loop that `generate` runs after its preparations, which know how many rows there are."""
    return (decode if input_ids.shape[0] == 1 else decode_batch)(model, input_ids, **options)
