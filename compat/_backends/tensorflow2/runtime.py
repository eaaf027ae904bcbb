"""The state and the mode of TensorFlow's runtime in this process."""

import sys


def has_listed_devices():
    """Whether TensorFlow has listed its devices, in which it looks at CUDA's variables."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    return context is not None and context._physical_devices is not None


def in_v1_mode(tf):
    """Whether ``tf.compat.v1.disable_v2_behavior()`` was called: graphs are TensorFlow 1's."""
    return not runs_eagerly(tf) and not tf.compat.v1.control_flow_v2_enabled()


def runs_eagerly(tf):
    """Whether TensorFlow computes eagerly where no function is traced."""
    v1 = tf.compat.v1
    return getattr(v1, "executing_eagerly_outside_functions", v1.executing_eagerly)()


def in_graph_of_the_user(tf):
    """Whether TensorFlow would compute eagerly, were it not for a ``tf.Graph`` around."""
    from tensorflow.python.eager import context

    return not runs_eagerly(tf) and context.default_execution_mode == context.EAGER_MODE


def full_name(device):
    """/cpu:1 as TensorFlow's graphs name it: /device:CPU:1."""
    return "/device:" + device.strip("/").upper()
