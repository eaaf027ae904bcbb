"""Whether code runs within a block of a certain kind: ``with uncounted:``, ``if uncounted:``."""

from _thread import get_ident


class Within(list):
    """True within such a block, on every thread, also where these are nested; a context manager."""

    def __enter__(self):
        self.append(get_ident())

    def __exit__(self, *raised):
        self.remove(get_ident())

    def here(self):
        """Return whether the thread that asks is within such a block itself."""
        return get_ident() in self
