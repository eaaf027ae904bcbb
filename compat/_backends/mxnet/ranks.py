"""keras-mxnet as one of several ranks: Horovod carries the gradients.

keras-mxnet's train function has its module go forward and backward, and then update. In between,
the gradients in the module's executor become the mean of all ranks', so that whatever the
optimizer does with gradients (it clips them, for example) it does with that mean, and it is the
user's own.
"""

import mxnet as mx
import numpy as np

from ..._ranks import keras2, step_functions
from ..._ranks import state as rank_state
from ..._ranks.engines import horovod
from ..._runtime import patching
from .synchronization import wait_for_updates


class MXNetHorovod(horovod.HorovodEngine):
    framework = "mxnet"

    def sum_numbers(self, values):
        array = mx.nd.array(values, mx.cpu(), "float64")
        return self.horovod.allreduce_(array, op=self.horovod.Sum, name="horovod_sum").asnumpy()

    def broadcast_bytes(self, content):
        array = mx.nd.array(content, mx.cpu(), "uint8")
        return self.horovod.broadcast_(array, 0, name="horovod_broadcast").asnumpy()

    def mean(self, arrays, share, name):
        """Set arrays to their means over all ranks, weighted by their shares of the rows.

        Arguments:
            arrays: dense and row-sparse ones, the same on all ranks.
            share: this rank's.
            name: of the operation; the ranks' operations of one name belong together.
        """
        # Without CUDA, Horovod would look for arrays of a GPU in the host's memory.
        sent = arrays if self.horovod.cuda_built() else [a.as_in_context(mx.cpu()) for a in arrays]
        groups = {}  # type: dict  # by dtype: an operation is of one
        for array in sent:
            array.wait_to_read()  # what goes wrong there is not Horovod's, nor a wait for others
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
                array.wait_to_read()  # MXNet computes, and fails, in threads of its own
        for array, mean in zip(arrays, sent):
            if mean is not array:
                mean.copyto(array)

    def _mean_of_rows(self, array, share, name):
        """The rows that any rank has; those of one index are summed up."""
        indices = self.horovod.allgather(array.indices, name=name + "_rows")
        values = self.horovod.allgather(array.data * share, name=name + "_values")
        rows, places = np.unique(indices.asnumpy(), return_inverse=True)
        sums = np.zeros((len(rows),) + array.shape[1:], array.dtype)
        np.add.at(sums, places, values.asnumpy())
        mean = mx.nd.sparse.row_sparse_array((sums, rows), array.shape, array.context, array.dtype)
        mean.copyto(array)

    def problem(self, error):
        if not isinstance(error, mx.base.MXNetError):
            return None
        # "MXNetError: Horovod has been shut down. This was caused by an exception on one of ..."
        return str(error).strip().split("\n")[0].split(": ", 1)[-1].split(". ")[0]


class MakeMXNetTrainFunction(keras2.MakeFunction):
    updates_by_itself = True

    def update(self, function, inputs):
        """Do what a step does besides training."""
        with patching.replaced(function.model._module, update=lambda: None):
            function.made(inputs)
        wait_for_updates()

    def run(self, function, inputs):
        share, inputs = self.share(function, inputs)
        model, module = function.model, function.model._module
        # Moving averages, MXNet's own and those of Keras' layers; no row of the batch's.
        rows = {variable.name for variable, _ in model.state_updates}
        rows.update(variable.name for variable in rank_state.tried(model))  # see keras2_state
        names = sorted(model._aux_names | set(model._train_updates) - rows)
        state = []  # type: list  # of the arrays that the step may set, and their values before

        def forward_backward(batch):
            """The module then has the gradients of all ranks."""
            (executor,) = module._curr_module._exec_group.execs
            held = dict(executor.arg_dict, **executor.aux_dict)
            state.extend((held[name], held[name].copy()) for name in names)
            type(module).forward_backward(module, batch)
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
            # Of the changes: what has none stays as it is to the bit.
            changes = [array - before for array, before in state]
            self.engine.mean(changes, share, "state")
            for (array, before), change in zip(state, changes):
                array[:] = before + change
        return result
