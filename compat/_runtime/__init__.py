"""What compat keeps and changes in this process, and what it reports of it."""

__version__ = "0.1.0"
