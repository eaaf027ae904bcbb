"""The types of the public calls, for type checkers alone: nothing imports this when it runs."""

from typing import Any, Dict, Optional, Sequence, TypeVar, Union

from typing_extensions import Protocol, TypedDict

Gpus = Union[None, int, str, Sequence[Union[int, str]]]

class KerasModel(Protocol):
    @property
    def get_weights(self) -> Any: ...

class TorchModule(Protocol):
    @property
    def named_parameters(self) -> Any: ...

class GluonBlock(Protocol):
    @property
    def collect_params(self) -> Any: ...

class MXNetModule(Protocol):
    @property
    def get_params(self) -> Any: ...

class TensorFlowModule(Protocol):
    @property
    def trainable_variables(self) -> Any: ...

class TensorFlowFunction(Protocol):
    @property
    def get_concrete_function(self) -> Any: ...

#: What ``parallelize()`` gives back as it came. A function that builds one of these is none of
#: them, although a model can be called, too.
Model = TypeVar(
    "Model",
    bound=Union[
        KerasModel, TorchModule, GluonBlock, MXNetModule, TensorFlowModule, TensorFlowFunction
    ],
)
Built = TypeVar("Built")

class Options(TypedDict, total=False):
    """The options of single backends that ``configure_gpu()`` takes."""

    allow_soft_placement: Optional[bool]
    device_count: Optional[Dict[str, int]]
    inter_op_parallelism_threads: Optional[int]
    intra_op_parallelism_threads: Optional[int]
    log_device_placement: Optional[bool]
    theano_flags: Any
