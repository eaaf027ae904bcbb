"""Why a step on several devices cannot be compared with the same step on one device."""

from typing import Any, Dict, Iterable, Mapping, NamedTuple, Tuple

from .._runtime import synchronized

# Attributes of layers of dropout and noise, with the rate or the deviation.
_RATES = ("rate", "_rate", "p", "stddev")
# Those of other layers, which drop some of their own values.
_INNER_RATES = ("dropout", "_dropout", "recurrent_dropout")
_SHOWN = 3


class Incomparable(NamedTuple):
    """Why a step cannot be compared.

    Attributes:
        text: the reason, a clause.
        remedy: what makes it comparable, an imperative; or "".
    """

    text: str
    remedy: str = ""


AMPLIFIED = Incomparable("it amplifies rounding too far")


def normalized(kind: str, name: str, model: "Any") -> "Incomparable":
    """Return the reason where a model has batch normalization.

    Arguments:
        kind: "layer", "module" or "block".
        name: its name.
        model: the model that is parallelized.
    """
    text = f"{kind} {name!r} normalizes each device's rows by their own statistics"
    if synchronized.is_asked(model):  # and this layer cannot be
        return Incomparable(text)
    return Incomparable(text, "pass sync_batch_norm=True (or --sync-batch-norm)")


def random(kind: str, rates: "Mapping[str, str]") -> "Incomparable":
    """Return the reason where a step is random.

    Arguments:
        kind: "layer", "module" or "block".
        rates: as ``rates`` returns them.
    """
    if not rates:
        return Incomparable("it is random")
    names = [repr(name) for name in rates]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    if len(names) == 1:
        (attribute,) = rates.values()
        return Incomparable(
            f"{kind} {names[0]} draws random numbers", f"set the {attribute} of {names[0]} to 0"
        )
    shown = ", ".join(names[:_SHOWN]) + more
    return Incomparable(
        f"{kind}s {shown} draw random numbers", f"set the rates of these {kind}s to 0"
    )


def both(first: "Incomparable", second: "Incomparable") -> "Incomparable":
    """Return the reason where there are two."""
    remedies = [reason.remedy for reason in (first, second)]
    return Incomparable(
        f"{first.text}; {second.text}", " and ".join(remedies) if all(remedies) else ""
    )


def rates(named: "Iterable[Tuple[str, Any]]") -> "Dict[str, str]":
    """Return the layers that draw random numbers in training: name -> attribute of the rate.

    Arguments:
        named: layers, each with its name.
    """
    found = {}
    for name, layer in named:
        kinds = [kind.__name__ for kind in type(layer).__mro__]
        is_random = any("Dropout" in kind or "Noise" in kind for kind in kinds)
        for attribute in _RATES if is_random else _INNER_RATES:
            rate = getattr(layer, attribute, None)
            if isinstance(rate, (int, float)) and rate > 0:
                found[name or type(layer).__name__] = attribute.lstrip("_")
    return found
