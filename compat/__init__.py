"""One way to choose GPUs and one way to train on several, for every multi-backend Keras code base.

Two calls, the same on every backend::

    import compat

    compat.configure_gpu(gpus=2)          # once, at script top
    model = compat.parallelize(model)     # the same model object, now on both GPUs
"""

from . import _api, _ranks, errors
from ._api import *
from ._api import device_use, legacy
from ._api.device_use import *
from ._api.legacy import *
from ._configuration.registry import register
from ._configuration.settings import Configuration
from ._ranks import *
from ._version import __version__
from .backend import Backend
from .errors import *

# Most public names are listed where they are defined.
__all__ = ["Backend", "Configuration", "__version__", "register"]
__all__ += _api.__all__
__all__ += _ranks.__all__
__all__ += device_use.__all__
__all__ += errors.__all__
__all__ += legacy.__all__
