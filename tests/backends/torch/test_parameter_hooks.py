"""Hooks of torch's on parameters of ranks get the mean over all ranks, as in one process."""

import re

import pytest

from .. import ranks
from .test_ranks import BEGIN

# Each kind of hook, with clipping that one rank's gradient would show.
HOOKS = """
import functools


def clip(gradient):
    return gradient.clamp(-0.02, 0.02)


def on_gradients(hook, model):
    return [parameter.register_hook(hook) for parameter in model.parameters()]


def on_parameters(hook, model):
    return [each.register_post_accumulate_grad_hook(hook) for each in model.parameters()]


def nothing(model):
    pass


def accumulate(count, loss):
    for _ in range(count):
        (loss / count).backward(retain_graph=True)


def clipped_norm(model, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def trained(name, before=nothing, after=nothing, back=lambda loss: loss.backward(), **options):
    torch.manual_seed(compat.rank())
    model = Module()
    model.before = before(model)
    compat.parallelize(model)
    after(model)
    if options.pop("norm", False):
        back = functools.partial(clipped_norm, model)
    said.setdefault("warned", []).extend(
        told(lambda: train(name, model, mse(model), back=back, **options))
    )
    return model


clips = functools.partial(on_gradients, clip)
thrice = functools.partial(accumulate, 3)
trained("before", clips)
trained("after", after=clips)
trained("one after the other", clips, functools.partial(on_gradients, lambda g: g ** 3))
trained("accumulated", clips, back=thrice)
trained("clipped by norm", clips, norm=True)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
trained("scaled", clips, back=lambda loss: scaler.scale(loss).backward())


def remove(model):
    for handle in model.before:
        handle.remove()


trained("removed", clips, remove)


def in_place(gradient):
    gradient.clamp_(-0.02, 0.02)


trained("in place", after=functools.partial(on_gradients, in_place))


def post(parameter):
    parameter.grad.clamp_(-0.02, 0.02)


trained("post", after=functools.partial(on_parameters, post), back=thrice)


def in_backward(model):
    adam = functools.partial(torch.optim.Adam, lr=0.01, foreach=False)
    optimizers = {parameter: adam([parameter]) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    on_parameters(step, model)


trained("optimizers in the pass", after=in_backward)
norms = []


def of_all(model):
    def note(gradients):
        norms.append(float(sum((gradient ** 2).sum() for gradient in gradients)))

    torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), note)


trained("all gradients", after=of_all)
said["norms"] = norms


def on_rank_0(model):
    if compat.rank() == 0:
        on_gradients(lambda gradient: None, model)
        on_parameters(lambda parameter: None, model)


trained("looked at on rank 0", after=on_rank_0, back=thrice)
model = trained("plain", clips)
gradients = torch.autograd.grad(model(torch.tensor(x)).sum(), list(model.parameters()))
weights["without exchange"] = [gradient.numpy() for gradient in gradients]


class Branches(Module):
    "Only the last four rows of a batch use the branch."

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(6, 1)

    def forward(self, x):
        output, chosen = super().forward(x), x[:, 0] > 0
        if chosen.any():
            places = chosen.nonzero()[:, 0]
            output = output + torch.zeros_like(output).index_put((places,), self.branch(x[chosen]))
        return output


chosen = x.copy()
chosen[:, 0] = np.where(np.arange(len(x)) % 8 < 4, -1, 1)
model = made(Branches)
clips(model)
train("used on some ranks", model, mse(model), batches=lambda: list(batches(chosen)))

model = compat.parallelize(keras.models.Sequential([dense(3, input_shape=(6,)), dense(1)]))
model.compile(keras.optimizers.SGD(0.05), "mse")
for weight in model.trainable_weights:
    weight.value.register_hook(clip)
model.fit(inputs, targets, rows, shuffle=False, verbose=0)
weights["keras"] = model.get_weights()


class Clips(keras.Model):
    "A step that clips by the norm of all gradients, which is a metric, too."

    def __init__(self):
        super().__init__()
        self.stack = keras.models.Sequential([dense(3, input_shape=(6,)), dense(1)])
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        return self.stack(x)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x))
        loss.backward()
        gradients = [weight.value.grad for weight in self.trainable_weights]
        norm = torch.sqrt(sum((gradient ** 2).sum() for gradient in gradients))
        factor = torch.clamp(0.3 / norm, max=1.0)
        with torch.no_grad():
            self.optimizer.apply([each * factor for each in gradients], self.trainable_weights)
        self.norm.update_state(norm)
        return {"norm": self.norm.result()}


model = compat.parallelize(Clips())
model.compile(keras.optimizers.SGD(0.05), "mse")
norms.extend(model.fit(inputs, targets, rows, shuffle=False, verbose=0).history["norm"])
weights["clipped in the step"] = model.get_weights()
"""

# What ranks cannot do as one process does.
CHANGES = """
def clip_outputs(module, inputs, outputs):
    return (inputs[0].clamp(-0.02, 0.02),)


def look(module, inputs, outputs):
    pass


def same(module, inputs, outputs):
    return inputs


model = made(Module)
model.stack[1].register_full_backward_hook(look)
model.stack[1].register_full_backward_hook(same)
said["look"] = told(lambda: train("look", model, mse(model)))
model.stack[1].register_full_backward_hook(clip_outputs)
said["module"] = told(lambda: train("module", model, mse(model)))
model = made(Module)


def clip_gradient(gradient):
    model.stack[2].bias.grad.clamp_(-0.02, 0.02)


def hooked(rows, targets):
    hidden = model.stack[:2](rows)
    hidden.register_hook(clip_gradient)
    return ((model(rows) - targets) ** 2).mean() + 0 * hidden.sum()


model.stack[1].register_full_backward_hook(lambda module, *gradients: clip_gradient(None))
said["parameter"] = told(lambda: train("parameter", model, mse(model)))
model = made(Module)
model.stack[2].bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad)
try:
    train("returns", model, mse(model))
except RuntimeError as error:
    said["returns"] = str(error)
weights.clear()
weights["none"] = []
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return what one process and two ranks have left of the programs above."""
    programs = {"hooks": BEGIN + HOOKS, "changes": BEGIN + CHANGES}
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), "torch")


def test_hooks_on_parameters_get_the_mean_over_all_ranks(jobs):
    """Also with an uneven last batch, which the last rank has fewer rows of."""
    (one,), (alone,) = jobs[0]["hooks"]
    assert alone["warned"] == []
    arrays, said = jobs[1]["hooks"]
    for other in arrays[1:]:
        ranks.check_arrays(one, arrays[0], other)
    for each in said:
        assert each["warned"] == []
        assert each["norms"] == pytest.approx(alone["norms"], rel=1e-4)


def test_hooks_that_change_what_is_a_rank_s_own_are_named(jobs):
    (alone,) = jobs[0]["changes"][1]
    returns = "Tensor post accumulate grad hooks should return None."
    assert alone == {"look": [], "module": [], "parameter": [], "returns": returns}
    for each in jobs[1]["changes"][1]:
        assert (each["look"], each["returns"]) == ([], returns)
        assert [re.sub(r"line \d+", "line N", text) for text in each["module"]] == [
            "The backward hook clip_outputs (changes-2.py, line N) of Tanh changes a gradient. It "
            "gets that of this rank's rows, whose loss is divided by fewer rows than that of one "
            "process, and not by all. If it is not linear, as where it clips, ranks train to other "
            "numbers: hooks on parameters, and changes of their gradients after backward(), see "
            "the mean over all ranks."
        ]
        assert each["parameter"] == [
            "The gradient of a parameter of Module, of shape (1,), was changed during the backward "
            "pass, by a hook of a module or of a tensor. It was that of this rank's rows: if the "
            "change is not linear, as where it clips, ranks train to other numbers than one "
            "process. Hooks on parameters, and changes after backward(), see the mean over all "
            "ranks."
        ]
