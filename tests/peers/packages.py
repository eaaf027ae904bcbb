"""Small models of packages for Keras and torch, on one device and on several, and what differs.

    .tox/py37-tensorflow23/bin/python tests/peers/packages.py deepctr keras-adabound

in the environment of a backend, with the packages on ``PYTHONPATH``, for example in a folder made
by ``pip install --target FOLDER --no-deps deepctr==0.9.4``. A package is run in three processes:
plain, and on simulated devices with ``verify=1`` and ``verify=0``. In all of them a model has the
same initial weights, the same batches of 7 rows, and no dropout; what is compared are predictions,
then losses of two epochs, and predictions after them. Batch normalization uses the statistics of
each device's rows: of a model with it, the first predictions alone have to be the same.

On TensorFlow 1 the plain run is on one device of compat: Keras by itself reads weights and step
counters while they change, so that two runs of it may differ.

exit status: 0 everything is the same, 1 something differs or fails.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
import compat
from compat._configuration import packages

#: How far a number may be from one device's, relative to the largest of its array.
TOLERANCE = 2e-4
ROWS, BATCH = 25, 7
DEVICES = int(os.environ.get("PACKAGES_DEVICES", "0"))

rng = np.random.RandomState(0)


def numbers(*shape):
    return rng.normal(size=(ROWS,) + shape).astype("float32")


def below(limit, *shape):
    return rng.randint(0, limit, (ROWS,) + shape)


def keras_and_layers():
    """Return the Keras that is installed: the package of that name, or TensorFlow's own."""
    keras = importlib.import_module("keras" if packages.version("keras") else "tensorflow.keras")
    return keras, keras.layers


def dense(*more, outputs=2, units=8):
    keras, layers = keras_and_layers()
    first = layers.Dense(units, activation="tanh", input_shape=(6,))
    return keras.models.Sequential([first] + list(more) + [layers.Dense(outputs)])


def fit(model, x, y, loss="mse", optimizer="sgd", batch=BATCH):
    """Return a function that trains a model of Keras, and returns values to compare."""

    def train():
        begin(model)
        model.compile(optimizer, loss)
        before, losses = predicted(model, x, batch), trained(model, x, y, batch)
        return before, losses, predicted(model, x, batch), [w.name for w in model.weights]

    return train


def begin(model):
    """Set random initial weights; those that are constant, such as zeros, stay as they are."""
    random, weights = np.random.RandomState(1), model.get_weights()
    for place, weight in enumerate(weights):
        if weight.dtype.kind == "f" and np.ptp(weight):
            inputs = weight.size / max(weight.shape[-2:])
            weights[place] = random.normal(scale=inputs**-0.5, size=weight.shape)
    model.set_weights(weights)


def trained(model, x, y, batch=BATCH):
    given = {"batch_size": batch, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **given).history["loss"]


def predicted(model, x, batch=BATCH):
    return model.predict(x, batch_size=batch, verbose=0)


def loop(net, x, y, accelerator=None):
    """Return a function that trains a module of torch in a common loop."""
    import torch

    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))

    def train():
        module = compat.parallelize(net) if DEVICES else net
        optimizer = torch.optim.SGD(module.parameters(), 0.01)
        loader = torch.utils.data.DataLoader(data, BATCH)
        if accelerator is not None:
            module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
        before, losses = called(module, x), []
        for rows, kinds in list(loader) * 2:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(rows), kinds)
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return before, losses, called(module, x), list(net.state_dict())

    return train


def called(module, x):
    """Return the outputs of a module of torch, which is in training mode before and after."""
    import torch

    module.eval()
    with torch.no_grad():
        found = torch.cat([module(rows) for rows in torch.tensor(x).split(BATCH)])
    module.train()
    return found.numpy()


def perceptron():
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


# Each package: what trains its models, by what is said of them. All are built before any is
# compiled. A function has the name of its package on PyPI.


def keras_bert():
    from keras_bert import AdamWarmup, get_model

    sizes = {"embed_dim": 12, "feed_forward_dim": 16, "transformer_num": 2, "head_num": 2}
    model = get_model(30, pos_num=8, seq_len=8, dropout_rate=0.0, **sizes)
    x, y = [below(30, 8), below(2, 8), below(2, 8)], [below(30, 8, 1), below(2, 1)]
    optimizer = AdamWarmup(decay_steps=20, warmup_steps=2, weight_decay=0.01)
    return {"BERT, AdamWarmup": fit(model, x, y, "sparse_categorical_crossentropy", optimizer)}


def keras_transformer():
    from keras_transformer import get_model

    sizes = {"encoder_num": 2, "decoder_num": 2, "head_num": 2, "hidden_dim": 16}
    model = get_model(30, 12, dropout_rate=0.0, **sizes)
    x, y = [below(30, 8), below(30, 8)], below(30, 8, 1)
    return {"translation": fit(model, x, y, "sparse_categorical_crossentropy")}


def keras_multi_head():
    from keras_multi_head import MultiHead, MultiHeadAttention

    keras, layers = keras_and_layers()
    made = {}
    for last in MultiHeadAttention(2), MultiHead(layers.LSTM(4), layer_num=2):
        embedding = layers.Embedding(30, 8, input_length=6, mask_zero=True)
        model = keras.models.Sequential([embedding, last])
        y = numbers(*model.output_shape[1:])
        made[type(last).__name__] = fit(model, below(30, 6), y)
    return made


def keras_adabound():
    from keras_adabound import AdaBound

    return {"AdaBound": fit(dense(), numbers(6), numbers(2), optimizer=AdaBound(final_lr=0.1))}


def keras_tcn():
    from tcn import TCN

    keras, layers = keras_and_layers()
    x = layers.Input((12, 3))
    out = TCN(nb_filters=4, kernel_size=3, dilations=[1, 2])(x)
    model = keras.models.Model(x, layers.Dense(2)(out))
    return {"TCN": fit(model, numbers(12, 3), numbers(2))}


def segmentation_models():
    import segmentation_models as sm

    sizes = {"decoder_filters": (16, 8, 8, 4, 4), "input_shape": (32, 32, 3)}
    model = sm.Unet("resnet18", encoder_weights=None, **sizes)
    y = below(2, 32, 32, 1)
    return {"U-Net on ResNet18": fit(model, numbers(32, 32, 3), y, sm.losses.bce_jaccard_loss)}


def efficientnet():
    from efficientnet.model import EfficientNet

    keras, _ = keras_and_layers()
    given = {name: getattr(keras, name) for name in ("backend", "layers", "models", "utils")}
    given.update(dropout_rate=0.0, drop_connect_rate=0.0, weights=None, classes=3)
    model = EfficientNet(1.0, 1.0, 32, input_shape=(32, 32, 3), **given)
    x, y = numbers(32, 32, 3), below(3, 1)
    return {"B0": fit(model, x, y, "sparse_categorical_crossentropy")}


def keras_retinanet():
    from keras_retinanet import losses, models

    keras, _ = keras_and_layers()
    model = models.backbone("mobilenet128_1.0").retinanet(num_classes=3)
    x = numbers(64, 64, 3)
    anchors = model.predict(x[:1])[0].shape[1]
    state = below(3, anchors, 1) - 1  # of an anchor: -1 to be ignored, 0 background, 1 an object
    boxes = np.concatenate([numbers(anchors, 4), state], 2)
    classes = np.concatenate([np.eye(3)[below(3, anchors)] * (state == 1), state], 2)
    loss = {"regression": losses.smooth_l1(), "classification": losses.focal()}
    y = {"regression": boxes, "classification": classes}
    return {"RetinaNet on MobileNet": fit(model, x, y, loss, keras.optimizers.SGD(1e-5))}


def deepctr():
    from deepctr.feature_column import DenseFeat, SparseFeat
    from deepctr.models import WDL, DeepFM

    columns = [SparseFeat("a", 20, 4), SparseFeat("b", 9, 4), DenseFeat("c", 3)]
    x, y = {"a": below(20), "b": below(9), "c": numbers(3)}, below(2)
    models = [(kind.__name__, kind(columns, columns, (8, 4))) for kind in (WDL, DeepFM)]
    return {name: fit(model, x, y, "binary_crossentropy") for name, model in models}


def kapre():
    from kapre import STFT, Magnitude, MagnitudeToDecibel
    from kapre.composed import get_melspectrogram_layer

    keras, layers = keras_and_layers()
    sizes = {"n_fft": 256, "hop_length": 128, "input_shape": (2048, 1)}
    bands = {"n_mels": 20, "sample_rate": 8000, "return_decibel": True}
    stft = [STFT(**sizes), Magnitude(), MagnitudeToDecibel(), layers.Conv2D(4, 3)]
    mel = [get_melspectrogram_layer(**dict(sizes, **bands))]
    x, y, made = numbers(2048, 1), numbers(3), {}
    for name, first in ("STFT", stft), ("mel spectrogram", mel):
        model = keras.Sequential(first + [layers.GlobalAveragePooling2D(), layers.Dense(3)])
        made[name] = fit(model, x, y, optimizer=keras.optimizers.SGD(1e-4))
    return made


def tensorflow_probability():
    import tensorflow_probability as tfp

    keras, layers = keras_and_layers()
    given = {"kernel_posterior_tensor_fn": lambda found: found.mean()}  # else they are random
    made = {
        "reparameterized layers": [
            layers.Reshape((3, 2), input_shape=(6,)),
            tfp.layers.Convolution1DReparameterization(4, 2, **given),
            layers.Flatten(),
            tfp.layers.DenseReparameterization(2, **given),
        ],
        "AutoregressiveNetwork": [
            layers.InputLayer((6,)),
            tfp.bijectors.AutoregressiveNetwork(2, event_shape=[6], hidden_units=[8]),
            layers.Flatten(),
        ],
        "ends in a distribution": [
            layers.Dense(4, input_shape=(6,)),
            tfp.layers.IndependentNormal(2, tfp.distributions.Distribution.mean),
        ],
    }
    for name, stack in made.items():
        loss = (lambda y, found: -found.log_prob(y)) if "distribution" in name else "mse"
        model = keras.Sequential(stack)
        made[name] = fit(model, numbers(6), numbers(*model.output_shape[1:]), loss)
    return made


def tensorflow_addons():
    import tensorflow_addons as tfa

    _, layers = keras_and_layers()
    x, y, made = numbers(6), numbers(2), {}
    for layer in tfa.layers.GroupNormalization(2), tfa.layers.Maxout(4):
        made[type(layer).__name__] = fit(dense(layer), x, y)
    for given in True, False:
        layer = tfa.layers.WeightNormalization(layers.Dense(5), data_init=given)
        made["WeightNormalization, data_init={}".format(given)] = fit(dense(layer), x, y)
    for loss in tfa.losses.TripletSemiHardLoss(), tfa.losses.TripletHardLoss():
        made[type(loss).__name__] = fit(dense(), x, below(3), loss)
    for kind in "LAMB", "LazyAdam", "NovoGrad", "RectifiedAdam", "Yogi":
        optimizer = tfa.optimizers.Lookahead(getattr(tfa.optimizers, kind)(0.01))
        made[kind + " in Lookahead"] = fit(dense(), x, y, optimizer=optimizer)
    return made


def keras_hub():
    import keras
    import keras_hub

    hub, image = keras_hub.models, (32, 32, 3)
    sizes = {"vocabulary_size": 50, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
    heads = dict(sizes, num_heads=2, max_sequence_length=8, dropout=0.0)
    grouped = dict(sizes, num_query_heads=2, num_key_value_heads=1)
    plain = {"use_pre_activation": False, "image_shape": image}
    resnet = hub.ResNetBackbone([64], [7], [64, 64], [1, 1], [1, 2], "basic_block", **plain)
    densenet = hub.DenseNetBackbone([1, 1], compression_ratio=0.5, growth_rate=8)
    tokens = {"token_ids": below(50, 8), "padding_mask": np.arange(8) < 3 + below(6, 1)}
    segments = dict(tokens, segment_ids=below(2, 8))
    masked = dict(segments, mask_positions=below(8, 2))
    text, words, images, kinds = {"dropout": 0.0}, below(50, 8), numbers(*image), below(3)
    loss, made = keras.losses.SparseCategoricalCrossentropy(from_logits=True), {}
    for kind, backbone, x, y, given in (
        ("BertTextClassifier", hub.BertBackbone(**heads), segments, kinds, text),
        ("BertMaskedLM", hub.BertBackbone(**heads), masked, below(50, 2), None),
        ("GPT2CausalLM", hub.GPT2Backbone(**heads), tokens, words, None),
        ("LlamaCausalLM", hub.LlamaBackbone(**grouped), tokens, words, None),
        ("ViTImageClassifier", hub.ViTBackbone(image, 8, 2, 2, 16, 32, 0.0), images, kinds, {}),
        ("ResNetImageClassifier", resnet, images, kinds, {}),
        ("DenseNetImageClassifier", densenet, images, kinds, {}),
    ):
        given = {} if given is None else dict(given, num_classes=3)
        model = getattr(hub, kind)(backbone=backbone, preprocessor=None, **given)
        made[kind] = fit(model, x, y, loss)
    return made


def keras_tuner():
    import keras_tuner

    x, y = numbers(6), numbers(2)

    def build(hp):
        model = dense(units=hp.Int("units", 4, 16, step=4))
        begin(model)
        model.compile(hp.Choice("optimizer", ["sgd", "adam"]), "mse")
        return model

    def search(cls, **options):
        with tempfile.TemporaryDirectory() as folder:
            tuner = cls(build, "val_loss", seed=3, directory=folder, **options)
            given = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            tuner.search(x, y, epochs=2, validation_data=(x, y), **given)
            scores = [trial.score for trial in tuner.oracle.get_best_trials(9)]
            return [], scores, predicted(tuner.get_best_models(1)[0], x), []

    return {
        "RandomSearch": lambda: search(keras_tuner.RandomSearch, max_trials=3),
        "GridSearch": lambda: search(keras_tuner.GridSearch, max_trials=3),
        "Hyperband": lambda: search(keras_tuner.Hyperband, max_epochs=3),
    }


def mlflow_skinny():
    import mlflow

    fitted = fit(dense(), numbers(6), numbers(2))
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a database needs more packages

    def train():
        with tempfile.TemporaryDirectory() as folder:
            mlflow.set_tracking_uri("file://{}/runs".format(folder))
            mlflow.tensorflow.autolog(log_models=False, log_datasets=False)
            with mlflow.start_run() as run:
                before, losses, after, names = fitted()
            logged = mlflow.get_run(run.info.run_id).data.metrics
            return before, [losses, [logged[key] for key in sorted(logged)]], after, names

    return {"tensorflow.autolog()": train}


def joblib():
    import joblib

    x, y, model, call = numbers(6), numbers(2), dense(), joblib.delayed

    def train():
        begin(model)
        model.compile("sgd", "mse")
        both = joblib.Parallel(n_jobs=2)([call(trained)(model, x, y), call(predicted)(model, x)])
        both += joblib.Parallel(n_jobs=2, backend="threading")([call(predicted)(model, x)] * 2)
        with tempfile.TemporaryDirectory() as folder:
            joblib.dump(model, os.path.join(folder, "model"))
            loaded = joblib.load(os.path.join(folder, "model"))
        return both[1:], [both[0], trained(loaded, x, y)], predicted(loaded, x), []

    return {"sent to processes and threads, dumped and loaded": train}


def timm():
    import torch

    # Where torchvision, as PyPI has it for CUDA, finds no operators of its own, it looks for these.
    for name in "nms", "qnms":
        signature = "(Tensor boxes, Tensor scores, float limit) -> Tensor"
        torch.library.define("torchvision::" + name, signature)
    import timm

    torch.manual_seed(1)
    x, y, made = numbers(3, 32, 32), below(3), {}
    swin = {"depths": (1, 1), "num_heads": (1, 2), "drop_path_rate": 0.0}
    for name, options in (
        ("resnet10t", {}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}),
        ("swin_tiny_patch4_window7_224", dict(swin, img_size=32, window_size=4)),
        ("mobilenetv3_small_050", {}),
        ("convnext_atto", {}),
    ):
        made[name] = loop(timm.create_model(name, num_classes=3, drop_rate=0.0, **options), x, y)
    return made


def lightning():
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = perceptron(), []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    x, y = numbers(6), below(3)

    def train():
        module = compat.parallelize(Module()) if DEVICES else Module()
        data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        before = called(module, x)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(data, BATCH))
        return before, module.losses, called(module, x), []

    return {"Trainer": train}


def accelerate():
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    return {"Accelerator": loop(perceptron(), numbers(6), below(3), accelerator)}


def mrcnn():
    from mrcnn.parallel_model import ParallelModel

    keras, _ = keras_and_layers()
    net, x, y = dense(), numbers(6)[:24], numbers(2)[:24]
    model = ParallelModel(keras.models.Model(net.input, net.output), 2)
    return {"ParallelModel": fit(model, x, y, batch=6)}  # it halves batches


FUNCTIONS = [keras_bert, keras_transformer, keras_multi_head, keras_adabound, keras_tcn]
FUNCTIONS += [segmentation_models, efficientnet, keras_retinanet, deepctr, kapre]
FUNCTIONS += [tensorflow_probability, tensorflow_addons, keras_hub, keras_tuner, mlflow_skinny]
FUNCTIONS += [joblib, timm, lightning, accelerate, mrcnn]
PACKAGES = {function.__name__.replace("_", "-"): function for function in FUNCTIONS}


def child(name):
    """Train the models of a package, and write what came of it as JSON."""
    if DEVICES:
        compat.configure_gpu(simulate=DEVICES, parallelize=True)
    elif (packages.version("tensorflow", "tensorflow-cpu") or "").startswith("1."):
        # Keras by itself does not train there the same way twice.
        compat.configure_gpu(simulate=1, parallelize=True)
    results = {}
    for what, train in PACKAGES[name]().items():
        rows = working()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before, losses, after, names = train()
        told = {str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)}
        results[what] = {
            "before": flat(before),
            "training": flat(losses) + flat(after),
            "own statistics": any("moving_var" in w or "running_var" in w for w in names),
            "devices": sum(now > then for now, then in zip(working(), rows)),
            "warnings": sorted(told),
        }
    with open(os.environ["PACKAGES_RESULTS"], "w") as file:
        json.dump(results, file)


def working():
    """How many rows each device has computed so far."""
    return [each.rows for each in compat.report().devices] if DEVICES else []


def flat(values):
    """Return the arrays of a structure, each as a list of numbers."""
    if isinstance(values, dict):
        values = [values[key] for key in sorted(values)]
    if isinstance(values, (list, tuple)) and any(np.ndim(each) for each in values):
        return [array for each in values for array in flat(each)]
    return [np.ravel(np.asarray(values, "float64")).tolist()]


def run(name, devices, verify):
    """Return the results of a subprocess; print why there are none, and return None."""
    with tempfile.TemporaryDirectory() as folder:
        written = os.path.join(folder, "results.json")
        given = {"PACKAGES_DEVICES": devices, "PACKAGES_RESULTS": written, "COMPAT_VERIFY": verify}
        command = [sys.executable, os.path.abspath(__file__), "--child", name]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ended = subprocess.run(command, env=dict(os.environ, **given), **output)
        if ended.returncode:
            print("{} fails: {}".format(name, ended.stdout.decode("utf-8", "replace")[-3000:]))
            return None
        with open(written) as file:
            return json.load(file)


def difference(one, other):
    """Return the largest difference, relative to the largest number of its array, or 0."""
    if [len(array) for array in one] != [len(array) for array in other]:
        return float("inf")
    pairs = [(np.array(a), np.array(b)) for a, b in zip(one, other) if a]
    return max([np.abs(a - b).max() / (np.abs(a).max() or 1) for a, b in pairs] or [0])


def compared(title, plain, found):
    """Tell how a model's results differ; whether they do so by more than rounding."""
    before, after = (difference(plain[part], found[part]) for part in ("before", "training"))
    worst = before if plain["own statistics"] else max(before, after)
    said = "same" if worst < TOLERANCE else "differs by {:.1e}".format(worst)
    if plain["own statistics"]:
        said += " before training; batch normalization, differs by {:.1e} after".format(after)
    print("{}: {}; devices that worked: {}".format(title, said, found["devices"]), flush=True)
    for warning in found["warnings"]:
        print(textwrap.indent(textwrap.fill(warning, 96), "    "))
    return not worst < TOLERANCE


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(PACKAGES), metavar="NAME")
    parser.add_argument("--devices", default="3", help="how many are simulated (3)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.names[0])
    status = 0
    for name in options.names:
        plain = run(name, "0", "0")
        for verify in "10":
            found = plain and run(name, options.devices, verify)
            status |= not found
            for what in found or ():
                title = "{} {}, {}, verify={}".format(name, packages.version(name), what, verify)
                status |= compared(title, plain[what], found[what])
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
