"""One way to choose GPUs and one way to train on several, for every multi-backend Keras code base.

Two calls, the same on every backend::

    import compat

    compat.configure_gpu(gpus=2)          # once, at script top
    model = compat.parallelize(model)     # the same model object, now on both GPUs
"""

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
from ._runtime import __version__
from .backend import Backend
from .errors import (
    AlreadyConfiguredError,
    AmbiguousBackendError,
    BrokenInstallError,
    CompatError,
    CompatWarning,
    ConfigurationFileError,
    DeviceFailedError,
    DevicesNotFoundError,
    DevicesNotUsedError,
    InvalidArgumentError,
    ModelFileError,
    NotAModelError,
    NotInstalledError,
    PythonNotFoundError,
    RankError,
    RankLostError,
    ResultsDifferError,
    TooLateError,
    UnknownOptionError,
    UnsupportedError,
)

__all__ = ["Backend", "Configuration", "__version__", "register"]
__all__ += ["configure_gpu", "device", "environment", "parallelize", "report", "timeline"]
__all__ += ["install_legacy_names", "make_parallel", "multi_gpu_model", "unwrap"]
__all__ += ["barrier", "is_chief", "local_batch_size", "local_rank", "rank"]
__all__ += ["scaled_learning_rate", "shard", "size"]
__all__ += ["AlreadyConfiguredError", "AmbiguousBackendError", "BrokenInstallError"]
__all__ += ["CompatError", "CompatWarning", "ConfigurationFileError", "DeviceFailedError"]
__all__ += [
    "DevicesNotFoundError",
    "DevicesNotUsedError",
    "InvalidArgumentError",
    "ModelFileError",
    "NotAModelError",
]
__all__ += ["NotInstalledError", "PythonNotFoundError", "RankError", "RankLostError"]
__all__ += ["ResultsDifferError", "TooLateError", "UnknownOptionError", "UnsupportedError"]
