"""Random programs: a Keras model, the data it sees, and what is done with it, all from one seed.

No Keras is imported here. A program is text: the lines that build its model are run as they are
printed (see parts.py for the names that are not Keras' own), and so are its steps.
"""

import collections

import numpy as np
from drawing import Drawing, Tensor, call_of
from kerases import SIMULATED as DEVICES

# One input or output of a model: ``kind`` says which values it takes.
Data = collections.namedtuple("Data", "kind shape")

# Something done with the model: a method, or "parallelize", and its options.
Step = collections.namedtuple("Step", "verb options")

#: What a program can contain that breaks an assumption of whoever splits batches. Each program
#: has one of these subjects at most, so that a difference tells which.
SUBJECTS = (
    "across rows",  # a layer that computes with several rows at once
    "batch norm",  # with data whose statistics are the same in each part of the batch
    "loss in a layer",  # add_loss, as a mean and as a sum
    "loss of the model",  # model.add_loss
    "activity",  # activity regularizers
    "scalar loss",  # a loss that is no mean over rows
    "state",  # counters, sums and means that layers of the test keep
    "row counts",  # inputs of different numbers of rows, which broadcast
    "subclass",  # a subclassed model around the functional one
    "stateful",  # a recurrent layer that keeps a state for each row
    "operation",  # one of the framework's own list, which most often computes across rows
)

#: What a layer can compute across rows; see ``parts.AcrossRows``.
ACROSS = ("centre", "softmax", "largest", "share")

LOSSES = {  # how the last layer ends, and which targets it is trained on
    "mse": (None, "normal"),
    "mae": (None, "normal"),
    "binary_crossentropy": ("sigmoid", "binary"),
    "categorical_crossentropy": ("softmax", "one-hot"),
    "sparse_categorical_crossentropy": ("softmax", "class"),
    "hinge": ("tanh", "sign"),
    "contrastive": (None, "normal"),
    "total": (None, "normal"),
}

# Keras 2 heeds the argument of the call, Keras 3 the attribute of the layer.
FROZEN = ("BatchNormalization", ["trainable=False"])

# What uses the moving averages of batch normalization; its variance may be that of each part.
AVERAGES = ("evaluate", "predict", "test_on_batch")

OPTIMIZERS = (
    ("SGD", "momentum=0.9"),
    ("SGD", "momentum=0.5, nesterov=True"),
    ("SGD", "clipnorm=0.5"),
    ("Adam", "epsilon=0.1"),  # with a small epsilon it makes of rounding a step like any other
    ("RMSprop", "epsilon=0.1"),
)


class Program(Drawing):
    """One random program.

    Arguments:
        seed: which one.
        lacks: what the Keras under test does not have; see ``parts.lacks``.
        subject: one of ``SUBJECTS``, None for a program without, or "any".
        operations: what "operation" draws from, see operations.py; None: that is not drawn.

    Attributes: ``lines`` (they build the model), ``inputs``, ``targets`` (lists of ``Data``),
    ``losses``, ``loss_weights``, ``optimizer``, ``metrics``, ``steps``, ``subject``.
    """

    def __init__(self, seed, lacks=(), subject="any", operations=None):
        super().__init__(seed, set(lacks) | (set() if operations else {"operation"}))
        self.operations = operations
        self.inputs, self.targets, self.losses, self.outputs = [], [], [], []
        some = [s for s in SUBJECTS if s not in self.lacks]
        # There are many operations, and few of the others.
        subjects = [None] * len(SUBJECTS) + some + some[-1:] * 9 * (some[-1] == "operation")
        self.subject = self.random.choice(subjects) if subject == "any" else subject
        self.rows_fixed = self.random.randint(2, 9) if self.subject == "stateful" else None
        self._draw_model()
        self._draw_compile()
        self.steps = list(self._draw_steps())

    def __str__(self):
        options = ["{}={!r}".format(*option) for option in sorted(self.compile_options.items())]
        compiled = "model.compile({}({}), {}, {})".format(
            self.optimizer[0], self.optimizer[1], self.losses, ", ".join(options)
        )
        steps = [
            "model.{}({})".format(s.verb, ", ".join("{}={!r}".format(*o) for o in s.options))
            for s in self.steps
        ]
        head = "# seed {}, subject: {}".format(self.seed, self.subject)
        return "\n".join([head] + self.lines + [compiled] + steps)

    # The model ----------------------------------------------------------------------------------

    def _draw_model(self):
        vectors = []
        for _ in range(2 if self.subject == "row counts" else self.few(1, 1, 2, 3)):
            tensor = self._draw_input()
            for _ in range(self.few(0, 1, 1, 2)):
                tensor = self._middle(tensor)
            vectors.append(self._as_vector(tensor))
        joined = vectors[0]
        for other in vectors[1:]:
            joined = self._merge(joined, other)
        if self.subject == "across rows":
            joined = self.layer("AcrossRows", [repr(self.pick(*ACROSS))], joined.shape, joined)
        elif self.subject == "operation":
            joined = self.layer("Dense", [6, "activation='tanh'"], (6,), joined)
            text, kind = self.operations.draw(self.random)
            joined = self.layer("Operation", [repr(text), repr(kind)], (6,), joined)
        elif self.subject == "state":
            kind = self.pick("count", "rows", "sum", "mean", "moving")
            joined = self.layer("Tally", [repr(kind)], joined.shape, joined)
        elif self.subject == "loss in a layer":
            joined = self.layer("AddLoss", [repr(self.pick("mean", "sum"))], joined.shape, joined)
        for _ in range(self.few(0, 0, 1, 2)):
            joined = self._middle(joined)
        self._draw_outputs(joined)
        names = [", ".join(names) for names in (["x%d" % i for i in range(len(self.inputs))],
                                                self.outputs)]  # fmt: skip
        kind = "Subclassed" if self.subject == "subclass" else "Model"
        self.lines.append("model = {}([{}], [{}])".format(kind, *names))
        if self.subject == "loss of the model":
            how = self.pick("mean", "sum")
            self.lines.append("model.add_loss({}({}))".format(how, joined.name))

    def _draw_input(self):
        kinds = ["vector", "vector", "sequence", "words", "image"]
        kind = {"row counts": "vector", "batch norm": self.pick("norm of images", "sequence"),
                "stateful": "sequence"}.get(self.subject) or self.pick(*kinds)  # fmt: skip
        kind = "image" if kind == "norm of images" else kind
        shape = {
            "vector": (4 if self.subject == "row counts" else self.pick(1, 3, 6),),
            "sequence": (4, self.pick(2, 3)),
            "words": (4,),
            "image": (5, 5, self.pick(1, 2)),
        }[kind]
        name = "x{}".format(len(self.inputs))
        batch = (self.rows_fixed,) + shape
        text = "batch_shape={}".format(batch) if self.rows_fixed else "shape={}".format(shape)
        self.lines.append("{} = Input({})".format(name, text))
        same = self.subject == "batch norm" and not self.inputs
        self.inputs.append(Data("same rows" if same else kind, shape))
        tensor = Tensor(name, shape)
        if kind == "words":
            masked = "masks" not in self.lacks and self.chance(0.5)
            mask = "mask_zero=True" if masked else ""
            regularizer = self.pick("", "embeddings_regularizer=l2(0.1)")
            options = [9, 3, regularizer, mask]
            return self.layer("Embedding", options, (4, 3), tensor, masked=masked)
        if (
            kind == "sequence"
            and "masks" not in self.lacks
            and self.chance(0.4)
            and (self.subject not in ("batch norm", "stateful"))
        ):
            return self.layer("Masking", [], shape, tensor, masked=True)
        if same:
            return self.layer("BatchNormalization", ["momentum=0.5"], shape, tensor)
        if self.subject == "stateful" and len(self.inputs) == 1:
            return self.layer("LSTM", [3, "stateful=True", self.rnn_options()], (3,), tensor)
        return tensor

    def _middle(self, tensor):
        """Return a layer that maps a vector to a vector, a sequence to one, an image to one."""
        draw = {1: self._vector, 2: self._sequence, 3: self._image}[len(tensor.shape)]
        return draw(tensor)

    def _vector(self, tensor):
        width = self.pick(2, 3, 5)
        dense = [width, self.activation(), self.weights()]
        if self.subject == "activity" and self.chance(0.8):
            dense.append("activity_regularizer=" + self.pick("l2(0.1)", "l1(0.1)"))
        kind = self.pick("Dense", "Dense", "Dense", "nested", "shared", "frozen", "norm", "PReLU",
                         "repeat")  # fmt: skip
        if kind == "nested":
            inner = "n{}".format(len(self.tensors))
            first = call_of("Dense", *dense, "input_shape={}".format(tensor.shape))
            self.lines.append("{} = Sequential([{}, Dense({})])".format(inner, first, width))
            return self._twice(inner, (width,), tensor)
        if kind == "shared":
            shared = "s{}".format(len(self.tensors))
            dense[0] = tensor.shape[0]
            self.lines.append("{} = {}".format(shared, call_of("Dense", *dense)))
            return self._twice(shared, tensor.shape, tensor)
        if kind == "frozen":
            return self.layer("Dense", dense + ["trainable=False"], (width,), tensor)
        if kind == "norm":
            return self.layer(*FROZEN, tensor.shape, tensor, training=False)
        if kind == "PReLU":
            return self.layer("PReLU", [], tensor.shape, tensor)
        if kind == "repeat":
            steps = self.pick(2, 3)
            return self._recurrent(self.layer("RepeatVector", [steps], (steps,) + tensor.shape,
                                              tensor), sequences=False)  # fmt: skip
        return self.layer("Dense", dense, (width,), tensor)

    def _twice(self, layer, shape, tensor):
        """Return a shared layer on this tensor and, where there is one of its shape, on another."""
        others = [t for t in self.tensors if t.shape == tensor.shape and not t.masked]
        first = self.apply(layer, shape, tensor)
        second = self.apply(layer, shape, self.pick(*others or [tensor]))
        return self.layer(self.pick("Add", "Multiply"), [], shape, first, second)

    def rnn_options(self):
        return "unroll=True" if "loops" in self.lacks or self.chance(0.2) else ""

    def _recurrent(self, tensor, sequences):
        width = self.pick(2, 4)
        kind = self.pick("LSTM", "GRU", "SimpleRNN")
        options = [width, self.rnn_options(), self.weights(), self.weights("recurrent")]
        if sequences:
            options.append("return_sequences=True")
        shape = tensor.shape[:1] + (width,) if sequences else (width,)
        if tensor.masked:
            return self.layer(kind, options, shape, tensor, masked=sequences)
        if self.chance(0.3):
            options.append("go_backwards=True")
        elif "Bidirectional" not in self.lacks and self.chance(0.3):
            shape = shape[:-1] + (2 * width,)
            return self.layer("Bidirectional", [call_of(kind, *options)], shape, tensor)
        return self.layer(kind, options, shape, tensor)

    def _sequence(self, tensor):
        kind = self.pick("RNN", "RNN", "TimeDistributed", "Activation", "Conv1D", "Dot", "Permute")
        steps, width = tensor.shape
        if kind == "RNN":
            return self._recurrent(tensor, sequences=True)
        if kind == "TimeDistributed":
            text = "Dense(3, {})".format(self.activation())
            return self.layer(kind, [text], (steps, 3), tensor, masked=tensor.masked)
        if kind == "Activation" or tensor.masked:
            return self.layer("Activation", ["'tanh'"], tensor.shape, tensor, masked=tensor.masked)
        if kind == "Conv1D":
            return self.layer(kind, [3, 3, "padding='same'", self.weights()], (steps, 3), tensor)
        if kind == "Dot":
            return self.layer(kind, ["axes=2"], (steps, steps), tensor, tensor)
        return self.layer(kind, [(2, 1)], (width, steps), tensor)

    def _image(self, tensor):
        height, width, channels = tensor.shape
        kind = self.pick("Conv2D", "Conv2D", "MaxPooling2D", "AveragePooling2D", "ZeroPadding2D",
                         "SeparableConv2D", "Conv2DTranspose", "norm of images")  # fmt: skip
        if kind == "norm of images":
            return self.layer(*FROZEN, tensor.shape, tensor, training=False)
        if kind in ("MaxPooling2D", "AveragePooling2D"):
            return self.layer(kind, [2, "padding='same'"],
                              ((height + 1) // 2, (width + 1) // 2, channels), tensor)  # fmt: skip
        if kind == "ZeroPadding2D":
            return self.layer(kind, [1], (height + 2, width + 2, channels), tensor)
        options = [2, 3, "padding='same'", self.activation()]
        if kind == "Conv2D":
            options.append(self.weights())
        return self.layer(kind, options, (height, width, 2), tensor)

    def _as_vector(self, tensor):
        if len(tensor.shape) == 1:
            return tensor
        if len(tensor.shape) == 3:
            return self._flat(tensor, "GlobalAveragePooling2D", "GlobalMaxPooling2D")
        if tensor.masked or self.chance(0.6):
            return self._recurrent(tensor, sequences=False)
        return self._flat(tensor, "GlobalAveragePooling1D", "GlobalMaxPooling1D")

    def _flat(self, tensor, *pooling):
        kind = self.pick("Flatten", *pooling)
        shape = (int(np.prod(tensor.shape)),) if kind == "Flatten" else tensor.shape[-1:]
        return self.layer(kind, [], shape, tensor)

    def _merge(self, first, second):
        kind = self.pick("Concatenate", "Add", "Multiply", "Average", "Maximum", "Dot")
        if kind == "Concatenate" and self.subject != "row counts":
            return self.layer(kind, [], (first.shape[0] + second.shape[0],), first, second)
        if first.shape != second.shape:
            second = self.layer("Dense", [first.shape[0]], first.shape, second)
        if self.subject == "row counts":
            return self.layer("Broadcast", [], first.shape, first, second)
        if kind == "Dot":
            return self.layer(kind, ["axes=1"], (1,), first, second)
        return self.layer(kind, [], first.shape, first, second)

    def _draw_outputs(self, joined):
        vectors = [t for t in self.tensors if len(t.shape) == 1]
        sequences = [t for t in self.tensors if len(t.shape) == 2 and
                     not (t.masked and "masked losses" in self.lacks)]  # fmt: skip
        losses = [loss for loss in sorted(LOSSES) if loss not in ("contrastive", "total")]
        if self.subject == "scalar loss":
            losses = ["contrastive", "total"]
        for place in range(self.few(1, 1, 2, 3)):
            loss = self.pick(*losses)
            activation, kind = LOSSES[loss]
            name = "name='y{}'".format(place)
            units = 3 if kind in ("one-hot", "class") else self.pick(1, 2)
            dense = [units] + (["activation={!r}".format(activation)] if activation else [])
            sequential = place and sequences and loss in ("mse", "binary_crossentropy")
            if sequential and self.chance(0.7):
                source = self.pick(*sequences)
                arguments = [call_of("Dense", *dense), name]
                output = self.layer("TimeDistributed", arguments, source.shape[:1] + (units,),
                                    source, masked=source.masked)  # fmt: skip
            else:
                source = self.pick(*vectors) if place and vectors else joined
                output = self.layer("Dense", dense + [name], (units,), source)
            self.outputs.append(output.name)
            self.losses.append(loss)
            self.targets.append(Data(kind, output.shape))

    # What is done with it -------------------------------------------------------------------------

    def _draw_compile(self):
        count = len(self.outputs)
        options = self.compile_options = {}
        if count > 1 and self.chance(0.4):
            options["loss_weights"] = [self.pick(0.5, 1.0, 2.0) for _ in range(count)]
        if count == 1 and self.targets[0].kind != "class" and self.chance(0.3):
            options["metrics"] = ["mae"]
        if self.eager:
            options["run_eagerly"] = True
        names = [o for o in OPTIMIZERS if o[0] not in self.lacks]
        self.optimizer = self.random.choice(names)

    def _rows(self, devices):
        if self.rows_fixed:
            return self.rows_fixed
        # The last: as many rows in each part as a sequence has steps.
        return self.pick(1, 2, devices - 1, devices + 1, 7, 10, 13, 4 * devices)

    def _draw_steps(self):
        devices = self.few(2, 3, 3, 4, 5, 6, 7, 8)
        yield Step("parallelize", [("gpus", devices)])
        rows = self._rows(devices)
        last = None
        if self.subject == "row counts":
            yield Step("call", [("rows", rows)])
            return
        for place in range(self.few(2, 3, 4)):
            verbs = ["train_on_batch", "fit", "fit", "evaluate", "predict", "test_on_batch",
                     "parallelize", "set_weights"]  # fmt: skip
            if self.subject == "batch norm":  # the others use the moving averages
                verbs = [verb for verb in verbs if verb not in AVERAGES]
            if place == 0 or last in ("parallelize", "set_weights"):
                verbs = ["train_on_batch", "fit"]
            last = self.pick(*verbs)
            if last == "parallelize":
                few = self.random.sample(range(DEVICES), 2)
                yield Step(last, [("gpus", self.random.choice([1, 2, 3, 5, few]))])
            elif last == "set_weights":
                yield Step(last, [])
            else:
                options = [("rows", rows)]
                if last in ("fit", "evaluate", "predict"):
                    batch = self.rows_fixed or self.pick(rows, max(1, rows // 2 + 1), 3)
                    options += [("batch_size", min(batch, rows))]
                if last in ("fit", "train_on_batch") and self.chance(0.35) and self._can_weigh():
                    options.append(self._weighting())
                yield Step(last, options)
        if last in ("parallelize", "set_weights"):
            yield Step("train_on_batch", [("rows", rows)])

    def _can_weigh(self):
        if self.subject == "scalar loss":
            return False
        sequences = any(len(target.shape) > 1 for target in self.targets)
        return not (sequences and "weights of sequences" in self.lacks)

    def _weighting(self):
        if self.losses == ["categorical_crossentropy"] and self.chance(0.5):
            return ("class_weight", {0: 1.0, 1: 3.0, 2: 0.5})
        return ("sample_weight", True)
