"""numpy, imported when it is first used, for modules that rarely need it."""

import importlib
from typing import Any


class OnDemand:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "Any":
        return getattr(importlib.import_module(self._name), attribute)


numpy = OnDemand("numpy")
