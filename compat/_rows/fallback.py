"""The fallback for what cannot be split: it runs unsplit, on one device, with a warning."""

import enum
from typing import Any, NamedTuple, Optional

from .. import errors
from .._runtime.process import process

#: Scope of a fallback where a graph can be cut, as the subject of a sentence.
DOWNSTREAM = "It, and everything computed from it,"
#: Scope of one where a graph is split again after it, likewise.
IN_BETWEEN = "It, and what is computed from it before the batch is split again,"


class Reason(enum.Enum):
    """Reason why an operation or a model cannot be split; its value is a sentence about it."""

    #: A rule or its arguments say so.
    CROSS_BATCH = "{} needs the whole batch, but each device sees only its shard."
    #: A trial on three rows says so.
    TRIAL_DIFFERS = (
        "{} gives different results for three samples at once than for two of them and the third, "
        "but each device sees only its shard."
    )
    #: There is no rule, and a trial is not possible or inconclusive.
    NO_RULE = (
        "{} may need the whole batch, but each device sees only its shard: compat has no rule for "
        "it, and cannot try it."
    )
    #: It raises an error that it does not raise for the whole batch.
    FAILS_ON_SHARD = "{} fails on a shard of the batch, which is all that each device sees."
    #: Replicas compute different operations.
    DIVERGES = (
        "{} takes another code path on a shard of the batch, which is all that each device sees."
    )
    CUSTOM_GRADIENT = (
        "{} has a custom gradient that needs, or may need, the whole batch, but each device sees "
        "only its shard."
    )
    OPAQUE_RESULT = (
        "{} returns an object that is not a tensor, such as a distribution, and those of the "
        "devices cannot be merged."
    )
    WEIGHT_ASSIGNED = (
        "{} assigns to a trainable weight when it is called, and the devices share that weight."
    )
    SIDE_EFFECTS = (
        "{} has side effects (on a list, a counter, random numbers), which each device would "
        "repeat."
    )
    SHARED_TABLE = (
        "{} looks up indices that depend on the batch and indices that do not in the same table, "
        "and the gradients of the two cannot be separated."
    )
    MONITOR = "{} has a Monitor, which would see each batch in shards, one from each device."
    SEVERAL_CONTEXTS = (
        "{} has its parameters on several contexts: the script splits its batches itself."
    )
    XLA_COMPILED = (
        "{} is a function that XLA compiles (jit_compile=True) with variables in it, which all "
        "have to be on the device that runs it."
    )
    TRANSFORMED = (
        "{} is called in a function that vmap(), grad() or the like transforms, which hides the "
        "batch dimension."
    )
    UNEVEN_EAGER = (
        "{} runs eagerly, where a batch is split only if its size is a multiple of the number of "
        "devices."
    )
    BATCH_DIMENSION = (
        "{} has recurrent or attention layers whose batch is neither the first nor the second "
        "dimension of its arguments, so that compat cannot identify the batch dimension."
    )


class Fallback(NamedTuple):
    """Reason to run a model unsplit, or all of it that follows from one operation.

    Arguments:
        reason: the reason.
        operation: the operation's name, with its kind, as the framework has them. None where only
            the model as a whole was tried, or where the location is not known yet.
        layer: the layer or module that it is in, or None.
        line: the line of the user's code that made it, as "file.py, line 12", or None.
    """

    reason: Reason
    operation: Any = None
    layer: "Optional[str]" = None
    line: "Optional[str]" = None

    def __str__(self) -> str:
        text = str(self.operation)
        text += f" in {self.layer}" if self.layer else ""
        return text + (f" ({self.line})" if self.line else "")

    def sentence(self, model: str) -> str:
        """Return the reason as a sentence about the operation, or about the model of this name."""
        is_model = self.operation is None
        subject = f"Model {model!r}" if is_model else f"The operation {self} of {model!r}"
        return self.reason.value.format(subject)


def warn_unsplit(
    model: Any,
    name: str,
    fallback: Fallback,
    device: str,
    scope: str = DOWNSTREAM,
    owner: Any = None,
) -> None:
    """Warn that a model, or a part of it, runs unsplit on one device.

    Arguments:
        model: the parallelized model, for reports and checks.
        name: its name.
        fallback: the reason.
        device: the device that it runs on.
        scope: what runs there, as the subject of a sentence in the singular, such as "The model".
        owner: an object for which there is only one warning; None: each call warns.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    if getattr(owner, "has_warned_unsplit", False):
        return
    sentence = fallback.sentence(name)
    configuration = process.configuration
    if configuration is not None and configuration.settings.strict:
        raise errors.UnsupportedError(
            f"{sentence} It would have to run unsplit on {device}, which strict=True makes an "
            "error. Compute it in the loss passed to compile(), which sees the whole batch; run "
            "the model on one device, with parallelize(model, gpus=1); or drop strict=True."
        )
    extent = "unsplit, because of the operation {}"
    if scope == DOWNSTREAM:
        extent = "split up to the operation {}, unsplit from there on"
    elif scope == IN_BETWEEN:
        extent = "split, but unsplit from the operation {} on to where the batch is split again"
    elif fallback.operation is None:
        extent = "unsplit"
    process.unsplit.record(model, name, extent.format(fallback))
    errors.warn(f"{sentence} {scope} runs unsplit on {device}.")
    if owner is not None:
        owner.has_warned_unsplit = True
