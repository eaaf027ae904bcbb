"""Graphs of Keras 2, in which all takes the longer the more models they have had."""

from ..models import clear_session, keras_under_test


def new_graph():
    """Leave the graph with the models so far; other Kerases have none."""
    if not hasattr(keras_under_test(), "ops"):
        clear_session(keras_under_test())
