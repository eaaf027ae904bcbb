"""Operations that TensorFlow 1 executed, where and when, as its sessions record each run."""

import contextlib
import functools
import inspect
import threading
from _thread import get_ident
from typing import Any, Dict, Iterator, List

from ..._runtime import patching
from ..._runtime.operation_times import converted, count_products
from .._tensorflow.graph import v1_names
from .._tensorflow.profiler import operations_of
from .configuration import backend_module, imported_keras_packages


def profiled(devices):
    """Profile the runs of sessions: see ``Backend.profiled()``."""
    return converted(
        recorded(v1_names()), lambda runs: operations_of([run.step_stats for run in runs], devices)
    )


@contextlib.contextmanager
def recorded(tf, thread=None, **options):
    """Record every run of a session within a block; yield a list of ``RunMetadata``.

    Runs are those of ``Session.run()`` and of Keras' functions, also of those that exist already.
    ``Session.make_callable()`` is not recorded.

    Arguments:
        tf: TensorFlow, with the names of version 1.
        thread: the thread whose runs are recorded; None: all threads.
        options: further fields of ``RunOptions``.
    """
    from tensorflow.python.client.session import BaseSession

    runs, trace = [], tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, **options)

    def traced(options):
        result = tf.RunOptions()
        if options is not None:
            result.CopyFrom(options)
        result.MergeFrom(trace)
        return result

    def record(run, *args, run_metadata=None):
        metadata = tf.RunMetadata() if run_metadata is None else run_metadata
        try:
            return run(*args, run_metadata=metadata)
        finally:
            if thread in (None, get_ident()):
                runs.append(metadata)

    plain_run = BaseSession.run

    def run(session, fetches, feed_dict=None, options=None, run_metadata=None):
        run = plain_run, session, fetches, feed_dict, traced(options)
        return record(*run, run_metadata=run_metadata)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patching.replaced(BaseSession, run=run))
        if hasattr(BaseSession, "_Callable"):  # of Keras' functions, from TensorFlow 1.8 on
            plain_make = BaseSession._make_callable_from_options
            plain_call = _call_with_metadata(BaseSession._Callable)

            def make(session, options):
                options.run_options.CopyFrom(traced(options.run_options))
                return plain_make(session, options)

            def call(function, *args, **kwargs):
                return record(plain_call, function, *args, **kwargs)

            patches.enter_context(patching.replaced(BaseSession, _make_callable_from_options=make))
            patches.enter_context(patching.replaced(BaseSession._Callable, __call__=call))
            patches.enter_context(_made_anew())
        yield runs


def _call_with_metadata(kind):
    """Return the method that runs a session's callable, with a parameter ``run_metadata``.

    In TensorFlow 1.8 and 1.9 it has none, and a run that is traced without one ends the process.
    """
    parameters = inspect.signature(kind.__call__).parameters.values()
    if any(each.kind is each.VAR_KEYWORD or each.name == "run_metadata" for each in parameters):
        return kind.__call__
    from tensorflow.python import pywrap_tensorflow
    from tensorflow.python.framework import errors

    def call(function, *args, run_metadata):
        session, buffer = function._session, pywrap_tensorflow.TF_NewBuffer()
        api = "" if session._created_with_new_api else "Deprecated"
        run = getattr(pywrap_tensorflow, f"TF_{api}SessionRunCallable")
        try:
            with errors.raise_exception_on_not_ok_status() as status:
                results = run(session._session, function._handle, args, status, buffer)
            run_metadata.ParseFromString(pywrap_tensorflow.TF_GetBuffer(buffer))
            return results
        finally:
            pywrap_tensorflow.TF_DeleteBuffer(buffer)

    return call


def keras_functions() -> "List[type]":
    """Return the classes of the functions that Keras compiles for many runs."""
    modules = [backend_module(keras) for keras in imported_keras_packages()]
    names = ("Function", "GraphExecutionFunction")
    classes = {getattr(module, name, None) for module in modules for name in names}
    return [kind for kind in classes if isinstance(kind, type)]


_around_calls: "List[Any]" = []
_changing_calls = threading.RLock()
_patches_of_calls = contextlib.ExitStack()


@contextlib.contextmanager
def around_calls(wrapper: "Any") -> "Iterator[None]":
    """Have ``wrapper(call, function)`` run in place of each call of a Keras function.

    Several may be in force at once, of several threads.

    Arguments:
        wrapper: a function that calls ``call()``.
    """
    with _changing_calls:
        if not _around_calls:
            for kind in keras_functions():
                replaced = patching.replaced(kind, __call__=_wrapped(kind.__call__))
                _patches_of_calls.enter_context(replaced)
        _around_calls.append(wrapper)
    try:
        yield
    finally:
        with _changing_calls:
            _around_calls.remove(wrapper)
            if not _around_calls:
                _patches_of_calls.close()


def _wrapped(plain):
    def __call__(function, *args, **kwargs):
        call = functools.partial(plain, function, *args, **kwargs)
        for wrapper in list(_around_calls):
            call = functools.partial(wrapper, call, function)
        return call()

    return __call__


@contextlib.contextmanager
def _made_anew():
    """Have Keras compile its functions again within a block, and once more after it."""
    functions: "List[Any]" = []

    def make_anew(call, function):
        if all(other is not function for other in functions):
            functions.append(function)
            function._callable_fn = None
        return call()

    try:
        with around_calls(make_anew):
            yield
    finally:
        for function in functions:
            function._callable_fn = None


# How operations are called, also after Grappler ("_FusedMatMul") and, in TensorFlow 2's v1 mode on
# CPUs that have what it wants, oneDNN ("_MklMatMul", "_MklNativeFusedMatMul").
MATRIX_PRODUCTS = ("MatMul", "Conv2D")
BACKWARD_PRODUCT = "Conv2DBackprop"


def partitions(metadata: "Any") -> "Dict[str, List[Any]]":
    """Return the operations that ran, by device, without constants."""
    graphs = [list(graph.node) for graph in metadata.partition_graphs if len(graph.node)]
    return {nodes[0].device[nodes[0].device.index("/device:") :]: nodes for nodes in graphs}


def products(ran):
    """Count the products among the operations that ran on each device; see ``count_products``."""
    return count_products(
        (device, "gradients" in node.name or BACKWARD_PRODUCT in node.op)
        for device, nodes in ran.items()
        for node in nodes
        if is_product(node) or BACKWARD_PRODUCT in node.op
    )


def is_product(node: "Any") -> bool:
    """Return whether a node is a matrix product or a convolution."""
    return node.op.endswith(MATRIX_PRODUCTS)
