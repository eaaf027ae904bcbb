"""State and changes of compat in this process, and reports of its work."""

__version__ = "0.1.0"
