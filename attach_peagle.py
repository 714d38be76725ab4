"""`drafter.attach(target)`: a target whose `generate` knows the drafter, and how that is undone."""

import copy
import functools
import inspect
import threading

from transformers import GenerationMixin


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .generation_peagle import speculative_generate
except ImportError:
    from generation_peagle import speculative_generate


GENERATE = inspect.signature(GenerationMixin.generate)
LOCK = threading.Lock()


def prepare_for(drafter, target, tokenizer=None):
    """Check that the drafter can draft for a target, move it to the target's device and dtype and into evaluation mode.

    Nothing of the target changes. For the arguments and errors see [`attach`].
    """
    if not isinstance(target, GenerationMixin):
        raise TypeError(
            f"{type(target).__name__} is not a transformers model that generates. A drafter is for a causal language model: "
            "of a peft model that is model.get_base_model(), and of a compiled one the model before compiling."
        )
    drafter.config.check_target(target, tokenizer)
    drafter.to(device=target.device, dtype=target.dtype).eval()


def attach(drafter, target, tokenizer=None) -> "Attachment":
    """Make `target.generate(..., assistant_model=drafter)` decode with this drafter.

    Replaces `target.generate` on this instance by one that recognises the drafter and passes everything else on. Nothing
    else of the target changes, and between calls nothing is kept but what forwards cost and how drafts fared. Attaching
    twice is the same as attaching once. The drafter is made ready by [`prepare_for`]. A deep copy of the target is attached
    too.

    Args:
        drafter (`PEagleModel`): The drafter.
        target (`PreTrainedModel`): The model it was trained for, with `generate`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, to check that it is the right one.

    Returns:
        [`Attachment`]: Use it in a `with` statement, or call its `detach()`, to restore the target.

    Raises:
        ValueError: The drafter was made for another target, or this one cannot be decoded speculatively.
        TypeError: The target cannot generate.
    """
    drafter.prepare_for(target, tokenizer)
    with LOCK:
        installed = vars(target).get("generate")
        found = next((wrapper for wrapper in wrappers(installed) if wrapper.drafter is drafter), None)
        if found is None:
            found = target.generate = DraftedGenerate(drafter, target, previous=installed)
        found.uses += 1
    return Attachment(target, found)


class DraftedGenerate:
    """What stands in the place of `target.generate`; `previous` stood there before, None for the method of the class.

    `uses` counts the attachments that are not undone.
    """

    def __init__(self, drafter, target, previous, uses: int = 0):
        self.drafter, self.target, self.previous, self.uses = drafter, target, previous, uses
        functools.update_wrapper(self, type(target).generate)

    def __call__(self, *args, **kwargs):
        arguments = GENERATE.bind(self.target, *args, **kwargs).arguments
        del arguments["self"]
        arguments |= arguments.pop("kwargs", {})
        *_, oldest = wrappers(self)
        # A wrapper that the user had put there goes on seeing every call.
        generate = oldest.previous or functools.partial(type(self.target).generate, self.target)
        # With `custom_generate` the user has named the decoding loop (ours asks for the drafter itself).
        if arguments.get("assistant_model") is self.drafter and arguments.get("custom_generate") is None:
            del arguments["assistant_model"]
            arguments.pop("custom_generate", None)
            return speculative_generate(self.drafter, self.target, generate=generate, **arguments)
        return (self.previous or generate)(**arguments)

    def __deepcopy__(self, memo):
        # A copy of the target decodes with its own weights, and with the same drafter.
        parts = copy.deepcopy(self.target, memo), copy.deepcopy(self.previous, memo)
        return DraftedGenerate(self.drafter, *parts, uses=1)

    def __reduce__(self):
        raise TypeError("A target cannot be pickled with a drafter attached: detach it first, or use save_pretrained.")


def wrappers(generate):
    """The [`DraftedGenerate`]s from the newest on, given what a target has in the place of `generate`."""
    while isinstance(generate, DraftedGenerate):
        yield generate
        generate = generate.previous


class Attachment:
    """Undoes [`attach`]: a context manager, or call `detach()`. The last one of a drafter to be undone restores the target."""

    def __init__(self, target, installed: DraftedGenerate):
        self.target, self.installed = target, installed

    def __enter__(self):
        return self.target

    def __exit__(self, *_):
        self.detach()

    def detach(self):
        with LOCK:
            ours, self.installed = self.installed, None
            if ours is None:
                return
            ours.uses -= 1
            if ours.uses:
                return
            newest = vars(self.target).get("generate")
            if newest is not ours:  # another drafter was attached later: this one goes from under it
                for wrapper in wrappers(newest):
                    if wrapper.previous is ours:
                        wrapper.previous = ours.previous
            elif ours.previous is None:
                del self.target.generate
            else:
                self.target.generate = ours.previous
