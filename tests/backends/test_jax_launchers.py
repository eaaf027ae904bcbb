"""Ranks of JAX under real launchers."""

from .launchers import Launchers, slurm  # noqa: F401  # a fixture


class TestJAXLaunchers(Launchers):
    backend = "jax"
