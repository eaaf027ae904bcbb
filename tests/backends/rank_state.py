"""State that layers of a script's own set as they train, as ranks have it: a program and checks.

By how it is computed: sums over rows, means, maxima, counters of rows and steps; and what is none
of these, for which there are warnings.
"""

import re

import numpy as np

#: Of tf.keras and Keras 3.
STATE = """
if hasattr(keras, "ops"):
    ops, cast, shape = keras.ops, keras.ops.cast, keras.ops.shape
    total, largest, smallest, average = ops.sum, ops.max, ops.min, ops.mean
    closest, one_hot, joined = ops.argmax, ops.one_hot, ops.concatenate
    maximum, minimum, transposed, product = ops.maximum, ops.minimum, ops.transpose, ops.matmul
else:
    import tensorflow as tf
    cast, shape = tf.cast, tf.shape
    total, largest, smallest = tf.reduce_sum, tf.reduce_max, tf.reduce_min
    average, closest, one_hot, joined = tf.reduce_mean, tf.argmax, tf.one_hot, tf.concat
    maximum, minimum, transposed, product = tf.maximum, tf.minimum, tf.transpose, tf.matmul


class Kept(keras.layers.Layer):
    "Sets what a test names."

    def __init__(self, names, **options):
        super().__init__(**options)
        self.names = names

    def build(self, input_shape):
        kinds = {
            "classes": (6,), "rows": (), "rows as int": (), "steps": (), "steps as int": (),
            "largest": (6,), "smallest": (), "average": (6,), "last sum": (6,),
            "sizes": (6,), "sums": (6, 6), "codebook": (6, 6), "centres": (6, 6), "queue": (4, 6),
            "place": (),
        }
        self.kept = {}
        for name in self.names:
            options = {"dtype": "int32"} if "int" in name or name == "place" else {}
            start = "ones" if name in ("sizes", "codebook") else "zeros"
            self.kept[name] = self.add_weight(
                name=name.replace(" ", "_"), shape=kinds[name], initializer=start,
                trainable=False, **options
            )
        super().build(input_shape)

    def call(self, x, training=None):
        if training:
            self.set(x)
        return x

    def set(self, x):
        rows = shape(x)[0]
        chosen = one_hot(closest(x, 1), 6)
        counts = total(chosen, 0)
        sums = product(transposed(chosen), x)

        def new(name, old):
            return {
                "classes": lambda: 0.9 * old + 0.1 * counts,
                "rows": lambda: old + cast(rows, "float32"),
                "rows as int": lambda: old + cast(rows, "int32"),
                "steps": lambda: old + 1.0,
                "steps as int": lambda: old + 1,
                "largest": lambda: maximum(old, largest(x, 0)),
                "smallest": lambda: minimum(old, smallest(x)),
                "average": lambda: 0.99 * old + 0.01 * average(x, 0),
                "last sum": lambda: total(x, 0),
                "sizes": lambda: 0.9 * old + 0.1 * counts,
                "sums": lambda: 0.9 * old + 0.1 * sums,
                "codebook": lambda: new("sums", self.kept["sums"] + 0.0)
                / new("sizes", self.kept["sizes"] + 0.0)[:, None],
                "centres": lambda: old
                - 0.5 * (counts[:, None] * old - sums) / (1.0 + counts)[:, None],
                "queue": lambda: joined([old, x], 0)[-4:],
                "place": lambda: (old + cast(rows, "int32")) % 7,
            }[name]()

        values = {name: new(name, self.kept[name] + 0) for name in self.names}
        for name, value in values.items():
            self.kept[name].assign(value)


def train(name, names, batches=3):
    def build():
        model = keras.Sequential([Kept(names, name="layer"), dense(1)], name=name)
        model.build((None, 6))
        return model

    model = compat.parallelize(build)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = inputs[: batches * rows], targets[: batches * rows]
    said[name] = told(lambda: model.fit(
        x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0
    ))
    values = [np.asarray(model.layers[0].kept[each]) for each in names]
    weights[name] = values + model.get_weights()[-1:]


train("sums", [
    "classes", "rows", "rows as int", "steps", "steps as int", "largest", "smallest", "average",
    "last sum", "sizes", "sums",
])
train("others", ["centres", "queue", "place"])


class Picky(Kept):
    "Takes no single row."

    def set(self, x):
        if x.shape[0] == 1:
            raise ValueError("a single row")
        super().set(x)


Kept = Picky
train("picky", ["average"], batches=2)
"""

#: Of Keras 2, by updates of a layer's own.
KERAS_2 = """
K = keras.backend


class Kept(keras.layers.Layer):
    def __init__(self, names, **options):
        super(Kept, self).__init__(**options)
        self.names, self.kept = names, {}

    def build(self, input_shape):
        for name in self.names:
            self.kept[name] = self.add_weight(
                name=name, shape=(1,), initializer="zeros", trainable=False
            )
        super(Kept, self).build(input_shape)

    def call(self, x):
        new = {
            "decaying": lambda old: 0.9 * old + 0.1 * K.sum(K.relu(x)),
            "rows": lambda old: old + K.sum(x * 0.0 + 1.0) / 6.0,
            "steps": lambda old: old + 1.0,
            "largest": lambda old: K.maximum(old, K.max(x)),
            "smallest": lambda old: K.minimum(old, K.min(x)),
            "average": lambda old: 0.9 * old + 0.1 * K.mean(x),
            "spread": lambda old: old + K.sqrt(K.mean(x * x)),
        }
        updates = [(self.kept[name], new[name](self.kept[name])) for name in self.names]
        is_mxnet = K.backend() == "mxnet"  # which lacks the function
        self.add_update(updates if is_mxnet else [K.update(*pair) for pair in updates], x)
        if is_mxnet:  # which takes variables that predictions depend on
            x = x + 0.0 * sum(K.sum(variable) for variable in self.kept.values())
        return x * 1.0

    def compute_output_shape(self, input_shape):
        return input_shape


def train(name, names):
    layer = Kept(names, name=name, input_shape=(6,))
    model = compat.parallelize(keras.models.Sequential([layer, dense(1)]))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    said[name] = told(lambda: model.fit(
        inputs, targets, batch_size=rows, epochs=2, shuffle=False, verbose=0
    ))
    weights[name] = [K.get_value(layer.kept[each]) for each in names] + model.get_weights()[-1:]


train("sums", ["decaying", "rows", "steps", "largest", "smallest", "average"])
train("others", ["spread"])
"""

#: Of torch, without Keras.
NATIVE = """
import torch


class Kept(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(6, 1)
        for name in ("classes", "largest", "average"):
            self.register_buffer(name, torch.zeros(6))
        for name in ("rows", "steps", "place"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("spread", torch.zeros(6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                counts = torch.nn.functional.one_hot(x.argmax(1), 6).sum(0)
                self.classes = 0.9 * self.classes + 0.1 * counts
                torch.maximum(self.largest, x.max(0).values, out=self.largest)
                self.average += 0.1 * (x.mean(0) - self.average)
                self.rows += len(x)
                self.steps += 1
                self.place.copy_((self.place + len(x)) % 7)
                self.spread.copy_((x * x).mean(0).sqrt())
        return self.last(x)


class Sums(torch.nn.Module):
    "Sums over all ranks by itself."

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(6, 1)
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x):
        total = x.sum(0)
        if compat.size() > 1:
            torch.distributed.all_reduce(total)
        self.total += total
        return self.last(x)


torch.manual_seed(0)
model = compat.parallelize(Kept())
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def loop():
    for epoch in range(2):
        for start in range(0, len(inputs), rows):
            x, y = [torch.as_tensor(each[start : start + rows]) for each in (inputs, targets)]
            optimizer.zero_grad()
            for part in range(2):  # gradients of two forward passes, and one backward pass
                loss = ((model(x) - y) ** 2).mean() + (loss if part else 0)
            loss.backward()
            optimizer.step()


said["told"] = told(loop)
weights["native"] = [value.numpy() for value in model.state_dict().values()]
said["names"] = list(model.state_dict())
model = compat.parallelize(Sums())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
said["by itself"] = told(loop)
weights["by itself"] = [value.numpy() for value in model.state_dict().values()]
"""

#: What each variable that is none of these is told, and what all ranks get.
MEAN, CHIEF = "the mean of the ranks' values, weighted by rows", "rank 0's"


def warning(name, what=MEAN):
    return (
        f"Training sets variable {name!r} from the rows of a batch, but not to their sum, mean, "
        f"maximum or minimum. All ranks get {what}, which is not what one process computes. Set "
        "the variable to one of these, and compute the rest where it is used."
    )


UNKNOWN = (
    "Training sets variable {!r}, and how that depends on the rows of a batch is not known: a step "
    "on some of them failed (ValueError: ...). All ranks get the mean of the ranks' values, "
    "weighted by rows, which may not be what one process computes."
)


def name_of(keras_3):
    """How this Keras names a variable of a layer."""
    return "{}/layer/{}".format if keras_3 else "layer/{1}:0".format


def check(alone, several, keras_3=True):
    """Check what one process and several ranks leave of STATE, the program "steps_state"."""
    (((one,), (alone,)), (of_ranks, said)) = [job["steps_state"] for job in (alone, several)]
    name, size = name_of(keras_3), len(said)
    assert alone == {"sums": [], "others": [], "picky": []}
    for values in of_ranks:
        for key in one:
            np.testing.assert_array_equal(values[key], of_ranks[0][key], err_msg=key)
            if not key.startswith("others"):
                np.testing.assert_allclose(values[key], one[key], rtol=1e-5, atol=1e-6, err_msg=key)
    assert one["sums-2"] == 42  # rows that are no float
    told = {"centres": MEAN, "queue": MEAN, "place": CHIEF}
    wanted = [warning(name("others", variable), what) for variable, what in told.items()]
    assert [each["sums"] for each in said] == [[]] * size
    assert [each["others"] for each in said] == [wanted] + [[]] * (size - 1)
    unknown = [
        re.sub(r"(ValueError): .*?[)][.] ", r"\1: ...). ", text) for text in said[0]["picky"]
    ]
    assert unknown == [UNKNOWN.format(name("picky", "average"))]


def check_of_keras_2(jobs):
    """Check what one process and two ranks leave of KERAS_2, a program among these jobs."""
    ((one,), _), (both, said) = (job["state"] for job in jobs)
    np.testing.assert_allclose([one["sums-1"], one["sums-2"]], [[42], [6]])
    for key in one:
        np.testing.assert_array_equal(both[0][key], both[1][key], err_msg=key)
        if key != "others-0":
            np.testing.assert_allclose(both[0][key], one[key], rtol=1e-5, atol=1e-6, err_msg=key)
    assert [each["sums"] for each in said] == [[], []]
    (warned,) = said[0]["others"]
    assert re.sub(r"'.*?'", "'spread'", warned) == warning("spread") and "spread" in warned
    assert said[1]["others"] == []


def check_native(alone, several):
    """Check what one process and several ranks leave of NATIVE, the program "buffers"."""
    (((one,), (alone,)), (of_ranks, said)) = [job["buffers"] for job in (alone, several)]
    size = len(said)
    places = {name: f"native-{place}" for place, name in enumerate(alone["names"])}
    places.update((name, name) for name in one if name.startswith("by itself"))
    assert (one[places["rows"]], one[places["steps"]]) == (84, 12)
    for name, key in places.items():
        for values in of_ranks:
            np.testing.assert_array_equal(values[key], of_ranks[0][key], err_msg=name)
            if name not in ("place", "spread"):
                np.testing.assert_allclose(values[key], one[key], 1e-5, 1e-6, err_msg=name)
    wanted = [warning("place", CHIEF), warning("spread")]
    assert [each["told"] for each in said] == [wanted] + [[]] * (size - 1)
    assert [each["by itself"] for each in said] == [[]] * size
