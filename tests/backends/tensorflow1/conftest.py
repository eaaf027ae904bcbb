"""TensorFlow 1: graph optimizations, which take a third of the time of these tests."""

import os

import pytest

from compat._backends._tensorflow.graph import v1_names

ENVIRONMENT = os.environ.get("TOX_ENV_NAME") or os.environ.get("COMPAT_TEST_EDGES")
# Subjects that depend on them, by the environment. In that of the whole contract the other tests
# compare results, as do idioms and random models, which have them there. Under another Keras the
# same TensorFlow is tested with them. The pairs of versions that CI tests have them where all pairs
# are tested.
DEPENDENT = {
    "py37-tensorflow1-keras224": "configuration contract executions profiler threads traffic",
    "py36-tensorflow112": "configuration contract executions profiler threads traffic",
    "py36-tensorflow112-tfkeras": "profiler",
    "py37-tensorflow1-keras231": "profiler",
    "py37-tensorflow1-tfkeras": "profiler",
    "edges": "profiler",
}


@pytest.fixture(scope="module", autouse=True)
def graph_optimizations(request):
    """Leave them out where other tests have them."""
    subject = request.module.__name__.rpartition("test_")[2]
    if subject in DEPENDENT.get(ENVIRONMENT, subject).split():
        yield
        return
    v1 = v1_names()
    plain = v1.Session.__init__

    def __init__(self, target="", graph=None, config=None):
        config = config or v1.ConfigProto()
        options = config.graph_options.rewrite_options
        if hasattr(options, "disable_meta_optimizer"):  # TensorFlow 1.8 has none
            options.disable_meta_optimizer = True
        plain(self, target, graph, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1.Session, "__init__", __init__)
        yield
