"""A script with all public names, as type checkers see it: ``mypy --strict``; nothing runs it."""

import warnings
from typing import Any, Dict, List, Optional, Sequence, Type

from typing_extensions import assert_type

import compat


class Net:
    """As a model of torch's: it can be called, too."""

    def named_parameters(self, prefix: str = "") -> Any: ...
    def __call__(self, *args: Any) -> int:
        return 0


class KerasModel:
    def get_weights(self) -> Any: ...
    def __call__(self, *args: Any) -> int:
        return 0


def build() -> KerasModel:
    return KerasModel()


configuration = compat.configure_gpu(gpus=[0, "1"], memory="4GiB", log_device_placement=True)
compat.configure_gpu(log_device_placment=True)  # type: ignore[call-arg]
compat.configure_gpu(gpu=2)  # type: ignore[call-arg]
compat.configure_gpu(inter_op_parallelism_threads="two")  # type: ignore[arg-type]
assert_type(configuration, compat.Configuration)
assert_type(configuration.devices, List[str])
assert_type(configuration.warnings, List[str])
assert_type(configuration.backend, str)
assert_type(configuration.versions, Dict[str, str])
assert_type(configuration.environ, Dict[str, Optional[str]])

assert_type(compat.parallelize(Net()), Net)
assert_type(compat.parallelize(KerasModel(), gpus=2), KerasModel)
assert_type(compat.parallelize(build, strategy="mirrored"), KerasModel)
compat.parallelize(3)  # type: ignore[call-overload]

assert_type([compat.rank(), compat.size(), compat.local_rank()], List[int])
assert_type(compat.local_batch_size(64), int)
assert_type(compat.scaled_learning_rate(0.1), float)
assert_type(compat.is_chief(), bool)
x = compat.shard([1, 2], 64)
compat.barrier()
with compat.timeline("timeline.json") as recorded, compat.device(0):
    print(compat.report())
assert_type(recorded.path, str)
assert_type(compat.report().to_html(), str)
assert_type(compat.report().devices[0].busy_parts, Optional[Sequence[float]])
print(compat.environment()["problems"])
old = compat.multi_gpu_model(KerasModel(), gpus=2)
older = compat.make_parallel(KerasModel(), 2)
inner = compat.unwrap(old)
assert_type(compat.install_legacy_names(), List[str])
try:
    print(compat.__version__)
except (compat.RankError, compat.CompatError) as error:
    assert_type(str(error), str)
kinds: List[Type[compat.CompatError]] = [
    compat.AlreadyConfiguredError,
    compat.AmbiguousBackendError,
    compat.BrokenInstallError,
    compat.ConfigurationFileError,
    compat.DeviceFailedError,
    compat.DevicesNotFoundError,
    compat.DevicesNotUsedError,
    compat.InvalidArgumentError,
    compat.ModelFileError,
    compat.NotAModelError,
    compat.NotInstalledError,
    compat.PythonNotFoundError,
    compat.RankLostError,
    compat.ResultsDifferError,
    compat.TooLateError,
    compat.UnknownOptionError,
    compat.UnsupportedError,
]
warnings.simplefilter("error", compat.CompatWarning)


class Mine(compat.Backend):
    name = framework = "mine"

    def devices(self) -> List[str]:
        return ["mine:0"]


compat.register(Mine())
