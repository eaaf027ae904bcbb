"""The fallback for what cannot be split: it runs unsplit, on one device, with a warning."""

from typing import Any, NamedTuple, Optional

from .. import errors
from .._runtime.process import process

#: What runs whole where a graph can be cut: the subject of a sentence.
FROM_THERE_ON = "It, and everything computed from it,"

#: What is wrong with the subject of a sentence, by ``Across.why``.
REASONS = {
    "mixed": "{} needs the whole batch, but each device sees only its shard.",
    "tried": "{} gives different results for three samples at once than for two of them and the "
    "third, but each device sees only its shard.",
    "unknown": "{} may need the whole batch, but each device sees only its shard: compat has no "
    "rule for it, and cannot try it.",
    "fails": "{} fails on a shard of the batch, which is all that each device sees.",
    "diverged": "{} takes another code path on a shard of the batch, which is all that each "
    "device sees.",
    "gradient": "{} has a custom gradient that needs, or may need, the whole batch, but each "
    "device sees only its shard.",
    "opaque": "{} returns an object that is not a tensor, such as a distribution, and those of "
    "the devices cannot be merged.",
    "weight": "{} assigns to a trainable weight when it is called, and the devices share that "
    "weight.",
    "effects": "{} has side effects (on a list, a counter, random numbers), which each device "
    "would repeat.",
    "table": "{} looks up indices that depend on the batch and indices that do not in the same "
    "table, and the gradients of the two cannot be separated.",
    "monitor": "{} has a Monitor, which would see each batch in shards, one from each device.",
    "contexts": "{} has its parameters on several contexts: the script splits its batches itself.",
    "compiled": "{} is a function that XLA compiles (jit_compile=True) with variables in it, "
    "which all have to be on the device that runs it.",
    "transformed": "{} is called in a function that vmap(), grad() or the like transforms, which "
    "hides the batch dimension.",
    "eager": "{} runs eagerly, where a batch is split only if its size is a multiple of the "
    "number of devices.",
    "rows": "{} has recurrent or attention layers whose batch is neither the first nor the second "
    "dimension of its arguments, so that compat cannot identify the batch dimension.",
}


class Across(NamedTuple):
    """What computes, or may compute, across the rows of a batch.

    Arguments:
        operation: the operation's name, with its kind, as the framework has them; None where only
            the model as a whole was tried.
        layer: the layer or module that it is in, or None.
        line: where the user's code made it, as "file.py, line 12", or None.
        why: "mixed" (a rule says so), "tried" (three rows gave other numbers than two of them and
            the third), "unknown" (no rule knows it, and a trial could not tell), "fails" (with an
            error that all rows do not raise), "diverged" (Python goes another way), "gradient" (a
            gradient of the user's own mixes rows), "opaque" (it returns what is no tensor),
            "weight" (it sets one that is trained), "table" (rows of one are looked up in two ways),
            "rows" (it is not known which dimension has them), "compiled" (by XLA, with variables),
            "transformed" (by ``vmap()``), "eager" (only even batches are split there), "effects"
            (Python code in it changes something), "monitor" (of MXNet's, is installed).
    """

    operation: Any
    layer: "Optional[str]" = None
    line: "Optional[str]" = None
    why: str = "mixed"

    def __str__(self):
        text = str(self.operation)
        text += f" in {self.layer}" if self.layer else ""
        return text + (f" ({self.line})" if self.line else "")

    def sentence(self, model):
        """Return what is wrong with the operation of a model of this name, or with that."""
        whole = self.operation is None
        subject = f"Model {model!r}" if whole else f"The operation {self} of {model!r}"
        return REASONS[self.why].format(subject)


def runs_whole(model, across, device, reach=FROM_THERE_ON, owner=None):
    """Warn that a model, or a part of it, runs with the whole batch on one device.

    Arguments:
        model: its name.
        across: an ``Across``.
        device: the device it runs on.
        reach: what runs there, as the subject of a sentence in the singular, such as "The model".
        owner: what runs it, if that says so only once.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    if getattr(owner, "said_to_run_whole", False):
        return
    found = across.sentence(model)
    configuration = process.configuration
    if configuration is not None and configuration.settings.strict:
        raise errors.UnsupportedError(
            f"{found} It would have to run unsplit on {device}, which strict=True makes an error. "
            "Compute it in the loss passed to compile(), which sees the whole batch; run the model "
            "on one device, with parallelize(model, gpus=1); or drop strict=True."
        )
    divided = "unsplit, because of the operation {}"
    if reach == FROM_THERE_ON:
        divided = "split up to the operation {}, unsplit from there on"
    elif across.operation is None:
        divided = "unsplit"
    process.whole[model] = divided.format(across)
    errors.warn(f"{found} {reach} runs unsplit on {device}.")
    if owner is not None:
        owner.said_to_run_whole = True
