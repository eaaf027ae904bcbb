"""keras-mxnet as one of several ranks: Horovod carries the gradients.

keras-mxnet's train function calls its module's forward and backward passes, and then updates the
weights. In between, the gradients in the module's executor become the means over all ranks, so that
the user's optimizer, unchanged, processes these means: it clips them, for example.
"""

import contextlib
from typing import Any, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np

from ..._ranks import keras2, step_functions
from ..._ranks import state as rank_state
from ..._ranks.engines import horovod
from ..._runtime import patching
from . import joined_executors, ranked_batch_norm
from .synchronization import wait_for_updates

_RANKED = "_compat_ranked_graph"  # an attribute: the model's, what is wanted, and that of ranks


class MXNetHorovod(horovod.HorovodEngine):
    """Horovod's operations on arrays of MXNet."""

    framework = "mxnet"

    def sum_numbers(self, values: "Any") -> "Any":
        """Return the sums of numbers over all ranks."""
        array = mx.nd.array(values, mx.cpu(), "float64")
        return self.horovod.allreduce_(array, op=self.horovod.Sum, name="horovod_sum").asnumpy()

    def broadcast_bytes(self, content: "Any") -> "Any":
        """Return the bytes of rank 0."""
        array = mx.nd.array(content, mx.cpu(), "uint8")
        return self.horovod.broadcast_(array, 0, name="horovod_broadcast").asnumpy()

    def mean(self, arrays: "List[Any]", share: float, name: str) -> None:
        """Set arrays to their means over all ranks, weighted by their shares of the rows.

        Arguments:
            arrays: dense and row-sparse ones, in the same order on all ranks.
            share: this rank's.
            name: of the operation, by which Horovod matches those of ranks.
        """
        # Without CUDA, Horovod would look for arrays of a GPU in the host's memory.
        sent = arrays if self.horovod.cuda_built() else [a.as_in_context(mx.cpu()) for a in arrays]
        groups: "Dict[str, List[Any]]" = {}  # by dtype: an operation has a single one
        for array in sent:
            array.wait_to_read()  # so that errors and time of computing it are not Horovod's
            if array.stype == "default":
                groups.setdefault(array.dtype.__name__, []).append(array)
        with self.waiting("for the others' gradients"):
            self.arrive()
            for dtype, group in sorted(groups.items()):
                for array in group:
                    array *= share
                self.horovod.grouped_allreduce_(
                    group, op=self.horovod.Sum, name="horovod_{}_{}".format(name, dtype)
                )
            for place, array in enumerate(sent):
                if array.stype != "default":
                    self._mean_of_rows(array, share, "horovod_{}_{}".format(name, place))
            for array in sent:
                array.wait_to_read()  # MXNet computes asynchronously, and raises errors here
        for array, mean in zip(arrays, sent):
            if mean is not array:
                mean.copyto(array)

    def _mean_of_rows(self, array, share, name):
        """Gather the rows that any rank has, and sum those of the same index."""
        indices = self.horovod.allgather(array.indices, name=name + "_rows")
        values = self.horovod.allgather(array.data * share, name=name + "_values")
        rows, places = np.unique(indices.asnumpy(), return_inverse=True)
        sums = np.zeros((len(rows),) + array.shape[1:], array.dtype)
        np.add.at(sums, places, values.asnumpy())
        mean = mx.nd.sparse.row_sparse_array((sums, rows), array.shape, array.context, array.dtype)
        mean.copyto(array)

    def problem(self, error: BaseException) -> "Optional[str]":
        """Return the first sentence of an error of Horovod's, or None for other errors."""
        if not isinstance(error, mx.base.MXNetError):
            return None
        # "MXNetError: Horovod has been shut down. This was caused by an exception on one of ..."
        return str(error).strip().split("\n")[0].split(": ", 1)[-1].split(". ")[0]


class MakeMXNetTrainFunction(keras2.MakeFunction):
    """The method by which keras-mxnet makes the function of a training step."""

    updates_by_itself = True

    def update(self, function, inputs):
        """Run a step without updating the weights."""
        with patching.replaced(function.model._module, update=lambda: None):
            function.made(inputs)
        wait_for_updates()

    def synchronize(self, model):
        """Have layers use the statistics of all ranks if they are to; return whether they do."""
        wanted, graph = joined_executors.requested(model), model._train_mxnet_symbol
        plain, present, ranked = vars(model).get(_RANKED) or (None, None, None)
        if graph is not ranked or wanted != present:
            plain = plain if graph is ranked else graph
            ranked = ranked_batch_norm.synchronized(plain, wanted)
            patching.attach(model, _RANKED, (plain, wanted, ranked))
            if graph is not ranked:
                model._train_mxnet_symbol = ranked
                model._module._buckets.pop("train", None)  # its executor, if there is one
        return ranked is not plain

    def run(self, function, inputs):
        """Run a training step with the means of gradients and moving averages over all ranks."""
        share, inputs = self.share(function, inputs)
        model, module = function.model, function.model._module
        is_synchronized = self.synchronize(model)
        # Moving averages, MXNet's and those of Keras' layers; no states of rows.
        rows = {variable.name for variable, _ in model.state_updates}
        rows.update(variable.name for variable in rank_state.tried(model))  # see keras2_state
        names = sorted(model._aux_names | set(model._train_updates) - rows)
        state: "List[Tuple[Any, Any]]" = []  # arrays that the step may set, and their values before

        def forward_backward(batch):
            """Compute gradients, which become the means over all ranks."""
            (executor,) = module._curr_module._exec_group.execs
            held = dict(executor.arg_dict, **executor.aux_dict)
            state.extend((held[name], held[name].copy()) for name in names)
            with contextlib.ExitStack() as stack:
                if is_synchronized:
                    stack.enter_context(self.engine.waiting("for the others' statistics"))
                    stack.enter_context(ranked_batch_norm.exchanging(self.engine, share))
                type(module).forward_backward(module, batch)
                if is_synchronized:
                    wait_for_updates()
            gradients = [array for array in executor.grad_arrays if array is not None]
            self.engine.mean(gradients, share, "gradients")
            self.engine.count("gradients")

        always = step_functions.always
        with step_functions.replaced(
            self.engine, module, always, forward_backward=forward_backward
        ):
            result = function.made(inputs)
        if state:
            wait_for_updates()
            # Means of the changes: states that do not change stay bitwise equal.
            changes = [array - before for array, before in state]
            self.engine.mean(changes, share, "state")
            for (array, before), change in zip(state, changes):
                array[:] = before + change
        return result
