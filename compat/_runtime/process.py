"""State of compat in this process, all in one object: ``process``."""

import os
from _thread import RLock  # threading costs an import

from .unsplit_models import UnsplitModels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

    from .._configuration.settings import Configuration


class Process:
    """State that outlasts a call: that of ``configure_gpu()``, and that of the process.

    Attributes:
        configuration: the result of ``configure_gpu()``; None before it is called.
        first_call: its arguments, normalised, and the environment before it; None likewise.
        parallelized_before: models parallelized before it, by name, and their devices.
        claims: open lock files of the idle GPUs that this process took, by UUID. The system drops
            the locks when the process ends.
        engines: those through which its ranks communicate, by class: it joins each once.
        configured_by: the command that configured this process before its script began; a call in
            the script then changes nothing. None: the script's own call does.
        uses_devices: whether a model was passed to a call of compat that runs it on several
            devices, was compiled under ``parallelize=True``, or has parts that ``device()`` placed.
        refused: models for which ``parallelize()`` has failed, by name, and the class of the error.
        parallelizes_compiled: whether Keras models are parallelized when they are compiled.
        keras_models: weak references to the models of Keras that ``parallelize()`` was given.
        on_parallelized: callbacks, which get the name of each model that is parallelized, and its
            devices.
        unsplit: models that run unsplit, or some of whose operations do.
        batches: how many batches were computed, by the arguments of ``work.count()``.
        unused: the warnings of models that did not run on all of their devices, by model name.
        same_rows: the warnings of models that all ranks train on the same rows, by model name.
        idle_devices: those on which the framework executed nothing of their rows.
        verified: a record for each model that was verified.
        records_operations: whether the first verified training step of each model records where
            its operations ran.
        samples: samples of the data that this process has passed to ``shard()``, by its number
            among the ranks.
        has_sharded: whether the script has called ``shard()`` in a rank.
        array_parts: the last arrays that ``shard()`` has returned to this rank.
        watches_adapt: whether layers that are adapted to such arrays are warned of.
        comparisons: how often ranks have compared the weights that they hold.
        graph_counters: functions that return the same for batches that graphs have counted.
        recording_timeline: the file of the timeline that is being recorded; None: none is.
        activities: when each device was executing operations in the last timeline.
        of_backends: state of each backend, from its configuration.
        configuring: held while one thread configures.
    """

    def __init__(self) -> None:
        self.configuring = RLock()
        self.configuration: "Optional[Configuration]" = None
        self.first_call: "Any" = None
        self.configured_by: "Optional[str]" = None
        self.uses_devices = False
        self.refused: "Dict[str, str]" = {}
        self.parallelizes_compiled = False
        self.keras_models: "List[Callable[[], Any]]" = []
        self.on_parallelized: "List[Callable[[str, str], None]]" = []
        self.parallelized_before: "List[Tuple[str, List[str]]]" = []
        self.unsplit = UnsplitModels()
        self.batches: "Dict[Any, int]" = {}
        self.unused: "Dict[str, str]" = {}
        self.same_rows: "Dict[str, str]" = {}
        self.idle_devices: "Set[str]" = set()
        self.verified: "List[Any]" = []
        self.records_operations = False
        self.samples: "Dict[int, Any]" = {}
        self.has_sharded = False
        self.array_parts: "List[Any]" = []
        self.watches_adapt = False
        self.comparisons = 0
        self.graph_counters: "Dict[Any, Callable[[], Any]]" = {}
        self.recording_timeline: "Optional[str]" = None
        self.activities: "Dict[str, Any]" = {}
        self.claims: "Dict[str, int]" = {}
        self.engines: "Dict[type, Any]" = {}
        self.of_backends: "Dict[Any, Dict[str, Any]]" = {}

    def start_afresh(self) -> None:
        """Forget everything, as a test does before and after it configures.

        Claims of idle GPUs are released. Settings that a framework has fixed stay fixed;
        environment variables and the patches of ``compat._runtime.patching`` stay as they are.
        """
        for lock in self.claims.values():
            os.close(lock)
        self.__init__()  # type: ignore[misc]


process = Process()
