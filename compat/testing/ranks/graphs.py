"""A new graph for Keras 2, where building a model takes longer the more were built before it."""

from ..models import clear_session, keras_under_test


def new_graph():
    """Leave the models built so far behind; Keras 3 has no graph to leave."""
    if not hasattr(keras_under_test(), "ops"):
        clear_session(keras_under_test())
