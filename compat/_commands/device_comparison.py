"""Training of a small model on one device and on several, compared step by step."""

import functools
import os
import warnings
from typing import Any, Dict, Optional

from .. import _api, _keras, _verification, errors
from .._configuration import detection, device_choice, gpu_selection
from .._runtime import progress
from .._runtime.process import process

#: Rows of the batches: even, uneven, few, fewer than devices, one.
BATCHES = (64, 61, 13, 2, 1)
_say = functools.partial(print, flush=True)
TOLERANCE = 1e-5  # the largest difference of a weight that still counts as rounding


@progress.shown("comparing one device with several")
def compare_devices(
    devices: Optional[int], backend: Optional[str], simulate: bool, outcome: Dict[str, Any]
) -> bool:
    """Configure, train twice side by side, and print the comparison as it goes.

    Arguments:
        devices: how many, or None for all GPUs, or 3 simulated ones where there are not two.
        backend: its name, or None for the one that Keras would use.
        simulate: whether to use CPU devices even if there are enough GPUs.
        outcome: a dictionary for the results that are printed.

    Returns:
        Whether the weights were the same, to ``TOLERANCE``, after every step, and every device
        worked, forward and backward.
    """
    # Tensor cores round float32 to ten bits of mantissa, differently for each batch size.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.update(detection.choose(backend, typed=True)[0].recording)
    configuration = _configure(devices, backend, simulate)
    _say(configuration)
    count = len(configuration.devices)
    outcome.update(backend=configuration.backend, devices=list(configuration.devices))
    if count < (devices or 2):
        raise errors.DevicesNotFoundError(
            f"{devices or 2} devices are needed for the comparison, but the framework shows "
            f"{', '.join(configuration.devices)}."
        )
    process.records_operations = True
    keras = _keras.import_keras(detection.choose(configuration.backend)[0])
    where = f"{configuration.devices[0]}, the same on {count} devices"
    _say(f"\nOne dense model on {where}, SGD with momentum:\n")
    same = _compare(keras, count, outcome)
    outcome["same"] = _show_where(configuration.devices, outcome) and same
    return outcome["same"]


def _show_where(devices, outcome):
    """Print where the first step's products ran, and return whether each device ran some."""
    ran = process.verified[-1].operations if process.verified else {}
    products = {device: list(ran.get(device, (0, 0))) for device in devices}
    outcome["products"] = products
    worked = [device for device in devices if min(products[device]) > 0]
    _say("\nMatrix products of a step that each device ran, forward + backward:")
    _say("\n".join("  {}: {} + {}".format(device, *products[device]) for device in devices))
    if len(worked) < len(devices):
        _say(f"NOT on all devices: {len(worked)} of {len(devices)} worked.")
    return len(worked) == len(devices)


def _configure(devices, backend, simulate):
    if not simulate:
        everything = gpu_selection.parse_gpus(None)
        simulate = len(device_choice.choose(everything, None, os.environ)) < (devices or 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.CompatWarning)  # the report shows them
        request: Dict[str, Any] = {"simulate": devices or 3} if simulate else {"gpus": devices}
        return _api.configure_gpu(backend=backend, verify=1, **request)


def _dense(keras):
    inputs = keras.layers.Input(shape=(8,))
    hidden = keras.layers.Dense(16, activation="tanh")(inputs)
    return keras.models.Model(inputs, keras.layers.Dense(4, activation="sigmoid")(hidden))


def _compare(keras, count, outcome):
    """Train the model on one device, and an equal one on all; return whether they stay equal."""
    import numpy as np

    single, several = (_api.parallelize(_dense(keras), gpus) for gpus in (1, count))
    several.set_weights(single.get_weights())
    for model in single, several:
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    random = np.random.RandomState(0)
    outcome.update(tolerance=TOLERANCE, steps=[])
    _say(f"step  rows  loss on 1  loss on {count:<2} largest difference of a weight")
    for step, rows in enumerate(BATCHES, 1):
        inputs = random.normal(size=(rows, 8)).astype("float32")
        targets = random.uniform(size=(rows, 4)).astype("float32")
        losses = [_train(model, inputs, targets) for model in (single, several)]
        weights = single.get_weights(), several.get_weights()
        difference = _verification.largest_difference(*weights)
        outcome["steps"].append({"rows": rows, "losses": losses, "difference": difference})
        _say("{:4}  {:4}  {:9.7f}  {:10.7f}  {:.1e}".format(step, rows, *losses + [difference]))
    same = all(step["difference"] <= TOLERANCE for step in outcome["steps"])  # NaN is not
    verdict = "The same: no weight ever differs" if same else "NOT the same: a weight differs"
    _say(f"\n{verdict} by more than {TOLERANCE:g}.")
    return same


def _train(model, inputs, targets):
    if hasattr(model, "reset_metrics"):  # Keras 3 averages over calls
        model.reset_metrics()
    loss = model.train_on_batch(inputs, targets)
    return float(loss[0] if isinstance(loss, (list, tuple)) else loss)
