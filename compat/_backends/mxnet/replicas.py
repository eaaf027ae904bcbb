"""Replicas of a model of any kind, and the methods of the model that they replace."""

from typing import Any, Tuple

from ..._runtime.patching import InstanceMethod, attach, detach
from .locks import CallLock


class Replicas:
    """The replicas of one model, each on its own context.

    Attributes:
        calls: the kinds of ``ReplicatedCall`` that replace the model's methods.
    """

    calls: "Tuple[Any, ...]" = ()

    def install_on(self, model: "Any") -> None:
        """Have the replicas run in place of the model's methods, one call at a time."""
        self._calling = CallLock()
        attach(model, "_compat_replicas", self)
        for kind in self.calls:
            kind(self).install(model)

    def remove_from(self, model: "Any") -> None:
        """Restore the model's own methods."""
        for kind in self.calls:
            kind.of(model).remove(model)
        detach(model, "_compat_replicas")


class ReplicatedCall(InstanceMethod):
    """A method of a model that its replicas run."""

    def __init__(self, replicas):
        super().__init__([])
        self.replicas = replicas
