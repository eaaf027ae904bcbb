"""Whether code runs within a block of a certain kind: ``with uncounted:``, ``if uncounted:``."""

from _thread import get_ident
from typing import List


class Within(List[int]):
    """True within such a block, on every thread, also where these are nested; a context manager."""

    def __enter__(self) -> None:
        self.append(get_ident())

    def __exit__(self, *raised: object) -> None:
        self.remove(get_ident())

    def here(self) -> bool:
        """Return whether the thread that asks is within such a block itself."""
        return get_ident() in self
