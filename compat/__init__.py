"""One way to choose GPUs and one way to train on several, for every multi-backend Keras code base.

Two calls, the same on every backend::

    import compat

    compat.configure_gpu(gpus=2)          # once, at script top
    model = compat.parallelize(model)     # the same model object, now on both GPUs
"""

from . import errors
from ._api import configure_gpu, device, parallelize
from ._api.device_use import environment, report, timeline
from ._api.legacy import install_legacy_names, make_parallel, multi_gpu_model, unwrap
from ._configuration.registry import register
from ._configuration.settings import Configuration
from ._ranks import (
    barrier,
    is_chief,
    local_batch_size,
    local_rank,
    rank,
    scaled_learning_rate,
    shard,
    size,
)
from ._version import __version__
from .backend import Backend
from .errors import *  # noqa: F403  # the classes in its __all__

__all__ = [
    "Backend",
    "Configuration",
    "__version__",
    "barrier",
    "configure_gpu",
    "device",
    "environment",
    "install_legacy_names",
    "is_chief",
    "local_batch_size",
    "local_rank",
    "make_parallel",
    "multi_gpu_model",
    "parallelize",
    "rank",
    "register",
    "report",
    "scaled_learning_rate",
    "shard",
    "size",
    "timeline",
    "unwrap",
]
__all__ += errors.__all__
