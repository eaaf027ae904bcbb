"""Run a program on one device and on several, and say what became of it."""

import kerases
import numpy as np
import parts
from comparing import TOLERANCES, verdict
from kerases import one, variables

import compat

#: Subjects that a backend may not be able to divide: there loud is as good as right.
MAY_REFUSE = ("across rows", "row counts", "state", "loss in a layer", "loss of the model",
              "activity", "scalar loss", "operation")  # fmt: skip


def data(program, step, rows, floatx):
    """Return inputs and targets of a number of rows, the same for each run of a step."""
    random = np.random.RandomState([program.seed % 2**32, step])
    inputs = []
    for place, (kind, shape) in enumerate(program.inputs):
        few = 1 if place and program.subject == "row counts" else rows
        if kind == "words":
            values = random.randint(0, 9, size=(few,) + shape)
            values[:, 0] = random.randint(1, 9, size=few)
        else:
            values = random.normal(size=(few,) + shape)
        if kind == "sequence":  # padding, which Masking leaves out
            for row, length in enumerate(random.randint(1, shape[0] + 1, size=few)):
                values[row, length:] = 0
        if kind == "same rows":
            values[:] = values[:1]
        inputs.append(values.astype(floatx))
    targets = []
    for kind, shape in program.targets:
        size = (rows,) + shape
        targets.append({
            "normal": lambda s: random.normal(size=s),
            "binary": lambda s: random.randint(2, size=s),
            "sign": lambda s: random.randint(2, size=s) * 2 - 1,
            "one-hot": lambda s: np.eye(3)[random.randint(3, size=s[:-1])],
            "class": lambda s: random.randint(3, size=s[:-1] + (1,)),
        }[kind](size).astype(floatx))  # fmt: skip
    weights = [random.uniform(0.2, 2, size=rows).astype(floatx) for _ in targets]
    for each in weights:
        each[1:-1:4] = 0  # not all of a last partial batch: Keras divides by their sum
    return inputs, targets, weights


def weights_of(program, model, salt=0):
    return kerases.randomized(model, np.random.RandomState([program.seed % 2**32, 7000 + salt]))


class Run:
    """One model of a program, on one device or on several.

    ``observed`` has for each step what it returned, and the weights after it.
    """

    def __init__(self, program, keras, parallel):
        self.program = program
        self.keras = keras
        self.parallel = parallel
        self.floatx = keras.backend.floatx()
        self.observed = []

    def go(self):
        names = parts.namespace(self.keras, self.program.operations)
        exec("\n".join(self.program.lines), names)
        self.model = names["model"]
        optimizer = kerases.optimizer(self.keras, *self.program.optimizer)
        losses = [names.get(loss, loss) for loss in self.program.losses]
        steps = list(enumerate(self.program.steps))
        self.step(*steps.pop(0))
        self.model.compile(optimizer, one(losses), **self.program.compile_options)
        self.model.set_weights(weights_of(self.program, self.model))
        self.note_weights()
        for place, step in steps:
            self.step(place, step)
        return self.observed

    def note(self, what, values):
        self.observed.append((what, [np.array(v, dtype="float64") for v in values]))

    def note_weights(self):
        # A variance that some versions correct for the number of rows is that of each part.
        self.note(
            "weights",
            [
                value
                for variable, value in zip(variables(self.model), self.model.get_weights())
                if not (self.program.subject == "batch norm" and "variance" in variable.name)
            ],
        )

    def step(self, place, step):
        verb, options = step.verb, dict(step.options)
        if verb == "parallelize":
            if self.parallel:
                compat.parallelize(self.model, **options)
            return
        if verb == "set_weights":
            self.model.set_weights(weights_of(self.program, self.model, salt=place))
            return
        inputs, targets, weights = data(self.program, place, options.pop("rows"), self.floatx)
        if options.pop("sample_weight", False):
            options["sample_weight"] = one(weights)
        inputs, targets = one(inputs), one(targets)
        if verb == "call":
            found = self.model(inputs)
            found = found if isinstance(found, (list, tuple)) else [found]
            return self.note(verb, [self.keras.ops.convert_to_numpy(f) if kerases.is_keras_3(
                self.keras) else f.numpy() for f in found])  # fmt: skip
        if verb == "predict":
            found = self.model.predict(inputs, verbose=0, **options)
            return self.note(verb, found if isinstance(found, list) else [found])
        if verb == "fit":
            history = self.model.fit(inputs, targets, shuffle=False, verbose=0, **options).history
            found = [history[key] for key in sorted(history)]
        elif verb == "evaluate":
            found = self.model.evaluate(inputs, targets, verbose=0, **options)
        else:
            found = getattr(self.model, verb)(inputs, targets, **options)
        self.note(verb, [np.ravel(found)])
        self.note_weights()


def attempt(program, keras):
    """Run a program both ways; the verdict."""
    tolerance = TOLERANCES[keras.backend.floatx()]
    return verdict(lambda parallel: Run(program, keras, parallel).go(), tolerance)
