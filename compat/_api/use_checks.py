"""Checks that parallelized models use all devices, or train together with the other ranks."""

from .. import _keras
from .._keras import steps, watched_methods
from .._runtime import patching, usage
from .._runtime.process import process


def watch(backend, model, name, devices):
    """Have the first steps of a model checked: whether all devices were used."""
    check = None
    process.unused.pop(name, None)
    if len(devices) > 1:
        of = usage.reference_to(model)  # what checks a model keeps none alive
        check = usage.UsageCheck(
            name,
            devices,
            lambda: backend.executed(of()),
            lambda: _hooks(of()),
            lambda: steps.why_unsplit(of()),
            lambda: of() in process.unsplit,
        )
    if _keras.keras_of(model) is None:
        backend.watch(model, check)
    else:
        watched_methods.install(model, check)
        backend.watch_loops(model, check)


def watch_rank(model, name, place):
    """Have a Keras model's steps checked: whether it trains together with the other ranks.

    A second time changes nothing, since steps that a graph was made for call nothing again.
    """
    if _keras.keras_of(model) is not None and watched_methods.check_of(model) is None:
        process.unused.pop(name, None)
        from .._ranks import rank_usage  # imports numpy

        engine = next(reversed(list(process.engines.values())), None)
        check = rank_usage.RanksCheck(model, place, engine, lambda: _hooks(model))
        watched_methods.install(model, check)


def _hooks(model):
    """Return what compat replaced on a model, by name."""
    if _keras.keras_of(model) is not None:
        return watched_methods.hooks(model)
    stacks = patching.InstanceMethod.all_of(model) if hasattr(model, "__dict__") else {}
    return {name: stack[-1] for name, stack in stacks.items()}
