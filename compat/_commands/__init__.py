"""The commands of ``compat``: see ``compat.__main__``."""
