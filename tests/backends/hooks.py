"""Hooks: what compat replaces of a framework or a model, left out one by one.

A hook that is left out is one that the framework does not reach: it is in its place, and what it
replaced runs in its stead. A step that depends on it must then warn, or raise, by itself.
"""

import contextlib
import types
import warnings

from compat._runtime import patching


def name_of(owner, attribute):
    """Return a hook's name: the class or module that has it, and the attribute."""
    if isinstance(owner, dict):
        return f"dictionary[{attribute}]"
    kind = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
    return f"{kind.__name__}.{attribute}"


class _Watched:
    """Notes each hook that is made, and leaves one out."""

    def __init__(self, left_out=None):
        self.left_out = left_out
        self.names = []
        self.was_left_out = False

    def is_left_out(self, owner, name):
        """Note a hook of ``owner``'s; return whether it is the one to leave out."""
        if type(owner).__module__.startswith("compat."):
            return False  # an object of compat's own, not of a framework
        if name not in self.names:
            self.names.append(name)
        self.was_left_out |= name == self.left_out
        return name == self.left_out


@contextlib.contextmanager
def _watched(left_out=None):
    watched = _Watched(left_out)
    install, call = patching.InstanceMethod.install, patching.InstanceMethod.__call__
    set_value, call_back = patching.Patch._set, patching.Callback.__call__

    def installing(hook, model, *args):
        if not hasattr(hook, "watches"):  # what checks all others
            watched.is_left_out(model, f"model.{hook.method}")
        return install(hook, model, *args)

    def calling(hook, model, *args, **kwargs):
        is_watch = hasattr(hook, "watches")
        if not is_watch and watched.is_left_out(model, f"model.{hook.method}"):
            return hook.plain(model)(*args, **kwargs)
        return call(hook, model, *args, **kwargs)

    def setting(patch, value):
        is_other = hasattr(patch, "watches") or hasattr(patch, "mends")
        if not is_other and watched.is_left_out(patch.owner, name_of(patch.owner, patch.name)):
            value = getattr(patch, "before", None) if patch.was_own else None
            if not patch.was_own and not isinstance(patch.owner, dict):
                value = getattr(patch.owner, patch.name, None)
        return set_value(patch, value)

    def calling_back(hook, *args):
        if not watched.is_left_out(None, hook.name):
            return call_back(hook, *args)

    patching.Callback.__call__ = calling_back
    patching.InstanceMethod.install = installing
    patching.InstanceMethod.__call__ = calling
    patching.Patch._set = setting
    try:
        yield watched
    finally:
        patching.InstanceMethod.install = install
        patching.InstanceMethod.__call__ = call
        patching.Patch._set, patching.Callback.__call__ = set_value, call_back


def left_out_one_by_one(program, exempt):
    """Return the reports of a program on each hook that compat makes, with that hook left out.

    Arguments:
        program: a function that parallelizes a new model, and trains, evaluates and predicts.
        exempt: the names of hooks that steps do not depend on, each with the reason.

    Returns:
        A dictionary: for each hook's name the first warning or error, or None: it was silent.
    """
    with _watched() as watched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program()
    unknown = set(exempt).difference(watched.names)
    assert not unknown, f"no such hook is made: {sorted(unknown)}"
    return {name: said_without(name, program) for name in watched.names if name not in exempt}


def said_without(name, program):
    """Return the first report of a program without a hook: a warning, an error, or None."""
    with _watched(name) as left_out, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        try:
            program()
        except Exception as raised:  # whatever goes wrong without it is not silent
            error = f"{type(raised).__name__}: {raised}"
        texts = [str(each.message) for each in caught if "compat" in each.category.__module__]
    assert left_out.was_left_out, f"{name} was not made again"
    return (texts + [error])[0]
