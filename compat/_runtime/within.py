"""Flags of blocks: ``with uncounted:``, and ``if uncounted:`` in code that runs within."""

from _thread import get_ident
from typing import List


class Within(List[int]):
    """A flag that is true within its blocks, on every thread, also where these are nested."""

    def __enter__(self) -> None:
        self.append(get_ident())

    def __exit__(self, *raised: object) -> None:
        self.remove(get_ident())

    def here(self) -> bool:
        """Return whether the current thread is within such a block itself."""
        return get_ident() in self
