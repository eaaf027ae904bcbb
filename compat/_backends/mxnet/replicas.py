"""Replicas of a model of any kind, and the methods of the model that they replace."""

from typing import Any, List, Tuple

from ..._runtime.patching import InstanceMethod, attach, detach
from .locks import CallLock


class Replicas:
    """The replicas of one model, each on its own context.

    Attributes:
        calls: the kinds of ``ReplicatedCall`` that replace the model's methods.
        methods: those that are installed, one of each kind.
    """

    calls: "Tuple[Any, ...]" = ()
    methods: "List[Any]"

    def install_on(self, model: "Any") -> None:
        """Have the replicas run in place of the model's methods, one call at a time."""
        self._calling = CallLock()
        attach(model, "_compat_replicas", self)
        self.methods = [kind(self) for kind in self.calls]
        for method in self.methods:
            method.install(model)

    def remove_from(self, model: "Any") -> None:
        """Restore the model's own methods.

        A function of the script that has replaced one of them meanwhile stays.
        """
        for method in self.methods:
            if type(method).of(model) is method:
                method.remove(model)
        detach(model, "_compat_replicas")


class ReplicatedCall(InstanceMethod):
    """A method of a model that its replicas run."""

    def __init__(self, replicas):
        super().__init__([])
        self.replicas = replicas

    def __call__(self, model, *args, **kwargs):
        if vars(model).get("_compat_replicas") is not self.replicas:
            # Removed, but a function of the script still calls it.
            return self.plain(model)(*args, **kwargs)
        return super().__call__(model, *args, **kwargs)
