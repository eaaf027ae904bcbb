"""Ranks on torch: torch.distributed."""

import os
import re
import sys

import numpy as np
import pytest
from outcomes import ended

from compat.testing import slow

from .. import rank_decisions, rank_state, ranks
from ..exchanges import EXPORT, UNREACHED, RankedParts


@pytest.mark.row("ranks: torch.distributed")
class TestTorchRanks(RankedParts):
    backend = "torch"
    exchanges = (6, 2)
    extension = ".keras"
    exempt_hooks = {
        "model.export": EXPORT,
        "Tensor.register_hook": "it tells which rows a loop of one's own goes back through",
    }
    policies = ("mixed_float16", "mixed_bfloat16")
    processes = True
    going_on = "go_on", "go_on_plain"

    def script(self):
        return PLAIN + super().script()

    def test_what_a_rank_did_not_do_is_said(self, results):
        """Of a whole step, and of a validation."""
        hook = "Parameter.register_post_accumulate_grad_hook"
        for rank, (_, facts) in enumerate(results(2, "left_out")):
            error = "DevicesNotUsedError: In the first {} of model 'net' (fit()) rank {} of 2 "
            assert facts["said"][hook] == (
                error.format("training step", rank)
                + "(compat run) exchanged no gradients with the other ranks. "
                + UNREACHED.format(hook + "()")
            )
            assert facts["said"]["model.test_step"] == (
                error.format("epoch", rank)
                + "(compat run) counted no batch. "
                + UNREACHED.format("model.test_step()")
            )


# A module in a loop of its own, and the files that torch's users write.
PLAIN = """
import os
import compat
from compat.testing import CASES
from compat.testing.ranks import programs


def go_on_plain(keras, folder, optimizer_name, extension, first, last, others=()):
    import torch

    def file_of(epoch, size):
        return os.path.join(folder, "plain-{}-of-{}.pt".format(epoch, size))

    torch.manual_seed(compat.rank())
    layers = torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)
    model = compat.parallelize(torch.nn.Sequential(*layers))
    adam = torch.optim.Adam(model.parameters(), 0.01)
    if first:
        saved = torch.load(file_of(first, first + 1))
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])
    data = CASES["dense"].data(programs.ROWS)
    x, y = map(torch.tensor, compat.shard(data, programs.BATCH))
    rows = compat.local_batch_size(programs.BATCH)
    arrays, losses = {}, []
    for epoch in range(first, last):
        for start in range(0, len(x), rows):
            adam.zero_grad()
            batch = slice(start, start + rows)
            torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            adam.step()
        for name, value in model.state_dict().items():
            arrays["epoch-%d-%s" % (epoch, name)] = value.numpy().copy()
        with torch.no_grad():
            whole = map(torch.tensor, data)
            losses.append(float(torch.nn.functional.mse_loss(model(next(whole)), next(whole))))
    if compat.is_chief():
        saved = {"model": model.state_dict(), "optimizer": adam.state_dict()}
        torch.save(saved, file_of(last, compat.size()))
    return arrays, {"losses": losses}


programs.go_on_plain = go_on_plain
"""


@pytest.mark.parametrize(
    "program",
    [ranks.STOPPED, pytest.param(ranks.STOPPED_AT_START, marks=slow)],  # there as JAX's
    ids=["trains", "starts"],
)
def test_a_rank_0_that_is_stopped_is_named(tmp_path, program):
    said = ranks.check_stopped_rank_0(tmp_path, "torch", program)
    assert "waitForInput" not in said, said  # torch's warning of a wait that is over


@slow  # as Theano's
def test_evaluation_on_one_rank_is_named_by_its_line(tmp_path):
    ranks.check_evaluation_on_one_rank(tmp_path, "torch")


@slow
def test_ranks_in_different_calls_are_told_which(tmp_path):
    ranks.check_different_calls(tmp_path, "torch", ranks.DOES_A_STEP)


SAVES = """
import torch
torch.save({"weight": torch.ones(2)}, "net.pt")
"""


def test_ranks_that_save_to_one_file_and_train_nothing_together_are_reported(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    command = [sys.executable, "-m", "compat", "run", "-n", "2", "--backend=torch", script]
    environ = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    status, out, err = ended(command, environ, cwd=str(tmp_path))
    assert (status, out) == (0, "")
    assert err == (
        "compat run: torch (--backend torch was asked for), CPU, unless the framework lists GPUs\n"
        "compat run: 2 ranks on this machine\n"
        "compat run: no model was given to compat.parallelize(), so the 2 ranks trained nothing "
        "together: each has run all of the script by itself. With --parallelize, its Keras models "
        "train together.\n"
        "compat run: ranks 0 and 1 both save to {}: each overwrites what another one has saved, or "
        "finds the file locked. Save under compat.is_chief(). Keras models that were given to "
        "compat.parallelize() are saved by rank 0 alone.\n".format(
            os.path.realpath(str(tmp_path / "net.pt"))
        )
    )


SPLIT = """
import torch
model = keras.models.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)], name="model")
model.compile("sgd", "mse")
own = np.full((14, 4), compat.rank(), "float32")


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(row, row[:1]) for row in own])


def fits():
    model.fit(own, own[:, :1], batch_size=7, verbose=0)
    model.fit(((own[:7], own[:7, :1]) for _ in range(3)), steps_per_epoch=2, verbose=0)
    model.fit(torch.utils.data.DataLoader(Rows(), 7), verbose=0)
    # Not told, since they are the script's own choice.
    rows = torch.utils.data.TensorDataset(torch.tensor(own), torch.tensor(own[:, :1]))
    sampler = torch.utils.data.DistributedSampler(rows, compat.size(), compat.rank())
    model.fit(torch.utils.data.DataLoader(rows, 7, sampler=sampler), verbose=0)
    model.fit(compat.shard(torch.utils.data.DataLoader(rows, 7)), verbose=0)
    batch = np.ones((7, 4)), np.ones((7, 1))
    model.fit(compat.shard(batch for _ in range(3)), steps_per_epoch=1, verbose=0)


print("TOLD", told(fits))
"""


@slow
def test_data_that_cannot_be_split_are_told(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ranks.BEGIN + SPLIT)
    job = TestTorchRanks().run(2, str(script), before=["--parallelize"])
    assert job.status == 0, job.err
    told = [
        "fit() of 'model' was given other data on other ranks, so each rank's data is taken for "
        "its own part, and batch_size for that of one rank. Data that are the same on all ranks "
        "are split: set a seed where they are shuffled or made at random.",
        "fit() of 'model' was given a DataLoader, which is not split over the ranks: each trains "
        "on all of it. Give each rank its part, with compat.rank() and compat.size(), or give "
        "arrays.",
    ]
    told.insert(1, told[0])
    assert job.out.count("TOLD {!r}".format(told)) == 2, job.out


def test_a_job_goes_on_from_its_checkpoint_after_a_rank_was_killed(tmp_path):
    ranks.check_restarts(TestTorchRanks(), tmp_path)


# Modules in loops of their own ----------------------------------------------------------------

BEGIN = """
import copy, dataclasses, io, types
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compat._ranks.engines import buckets

buckets.SIZES[:] = 16, 64  # bytes: even small models have several buckets


def made(build):
    "A module of the ranks', with other weights on each before that."
    torch.manual_seed(compat.rank())
    return compat.parallelize(build())


def batches(x=x, y=y, batch=BATCH):
    x, y = compat.shard((x, y), batch)
    local = compat.local_batch_size(batch)
    for start in range(0, len(x), local):
        yield torch.tensor(x[start : start + local]), torch.tensor(y[start : start + local])


def train(name, model, loss, optimizer=None, batches=batches, back=lambda loss: loss.backward()):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for rows, targets in batches():
        optimizer.zero_grad()
        back(loss(rows, targets))
        optimizer.step()
    keep(name, model)


def keep(name, model):
    weights[name] = [tensor.detach().numpy() for tensor in model.state_dict().values()]


def mse(model):
    return lambda rows, targets: ((model(rows) - targets) ** 2).mean()


def stack(units=1):
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, units))


class Module(nn.Module):
    def __init__(self, units=1):
        super().__init__()
        self.stack = stack(units)

    def forward(self, x):
        return self.stack(x)
"""

# Whatever calls the model, and whatever it returns.
CALLS = """
@dataclasses.dataclass
class Output:
    prediction: torch.Tensor
    nothing: object = None


class Slotted:
    __slots__ = ("inner",)


class Mapped(dict):
    "As tokenizers give."


class Takes(Module):
    def forward(self, batch):
        return Output(types.SimpleNamespace(deep=super().forward(batch.inner["x"])))


def slotted(rows):
    batch = Slotted()
    batch.inner = {"x": rows}
    return batch


model = made(Takes)
train(
    "custom batch",
    model,
    lambda rows, targets: ((model(slotted(rows)).prediction.deep - targets) ** 2).mean(),
)


class TakesMapped(Module):
    def forward(self, batch):
        return Mapped(y=super().forward(batch["x"]))


model = made(TakesMapped)
train("mapped", model, lambda x, y: ((model(Mapped(x=x))["y"] - y) ** 2).mean())

model = made(lambda: nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(1)))
first = list(batches())[0]
model(first[0])  # makes the weights
loss = mse(model)
train("lazy", model, loss)


class Encodes(Module):
    def encode(self, x):
        return self.stack(x)

    def forward(self):
        return self.stack(self.rows)

    def loss(self, x, y):
        return ((self.stack(x) - y) ** 2).mean()


def even():
    return list(batches())[:2]


model = made(Encodes)
said["warned"] = told(lambda: train("another method", model, model.loss, batches=even))


def takes_nothing(rows, targets):
    model.rows = rows
    return ((model() - targets) ** 2).mean()


model = made(Encodes)
train("takes nothing", model, takes_nothing, batches=even)

model = made(Module)
compiled = torch.compile(model, backend="aot_eager")
train("compiled", model, mse(compiled))
model = made(Module)
model.compile(backend="aot_eager")
train("compiled in place", model, mse(model))

model = copy.deepcopy(made(Module))
train("a copy", model, mse(model))
torch.save(model, io.BytesIO())
model = made(Module)
for number, parameter in enumerate(model.parameters()):
    parameter.requires_grad = number > 1
train("frozen", model, mse(model))
for parameter in model.parameters():
    parameter.requires_grad = True
train("thawed", model, mse(model))
"""


def test_every_backward_pass_is_exchanged_whatever_called_the_model(jobs):
    """With an uneven last batch, but for the two that show no rows."""
    said = ranks.check_same(jobs, "calls")
    assert said[0]["warned"] == [
        "A backward pass reached the parameters of Encodes, but no call of the model in which rows "
        "of a batch are seen. So all ranks count alike, which is one process's gradient where all "
        "have the same number of rows. Call the model itself with a batch of tensors."
    ]
    assert said[1]["warned"] == []


# Hooks that torch does not reach, one by one.
HOOKS = """
sys.path.append({!r})
from backends import hooks, rank_hooks


def program():
    rank_hooks.take_back_patches()
    model = made(stack)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows, targets in list(batches())[:2]:
        optimizer.zero_grad()
        mse(model)(rows, targets).backward()
        optimizer.step()


with warnings.catch_warnings():
    warnings.simplefilter("error", compat.CompatWarning)
    program()
said.update(hooks.left_out_one_by_one(program, {{}}))
""".format(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def test_a_hook_that_torch_does_not_reach_is_never_silent(jobs):
    """Of a loop of one's own. What only rank 0 tells, the other one leaves to it."""
    _, said = jobs[1]["hooks"]
    for rank, found in enumerate(said):
        told = dict.fromkeys(["model.forward", "Tensor.register_hook"], NO_ROWS)
        step = f"In the first training step of model 'Sequential' ({{}}()) rank {rank} of 2 "
        for hook in ("torch.autograd.backward", "Node.register_prehook"):
            told[hook] = step.format("backward") + LEFT_OUT.format(hook + "()")
        for hook in (
            "Parameter.register_post_accumulate_grad_hook",
            "Variable._execution_engine.queue_callback",
        ):
            what = "(compat run) exchanged no gradients with the other ranks. "
            told[hook] = step.format("SGD.step") + what + UNREACHED.format(hook + "()")
        if rank:
            told.update(dict.fromkeys(["model.forward", "Tensor.register_hook"]))
        assert found == told


NO_ROWS = (
    "A backward pass reached the parameters of Sequential, but no call of the model in which rows "
    "of a batch are seen. So all ranks count alike, which is one process's gradient where all "
    "have the same number of rows. Call the model itself with a batch of tensors."
)
LEFT_OUT = "(compat run) did not do all that ranks depend on. " + UNREACHED


# DataLoaders.
LOADERS = """
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

dataset = TensorDataset(torch.tensor(x), torch.tensor(y))


def seeded():
    return torch.Generator().manual_seed(3)


class Shuffled:
    "A sampler without a generator, of seeds of its own."

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 21

    def set_epoch(self, epoch):
        self.seed += 10 * epoch

    def __iter__(self):
        return iter(np.random.RandomState(self.seed).permutation(21).tolist())


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(dataset)


def epochs(loader):
    part = compat.shard(loader)
    assert type(part) is DataLoader and part.collate_fn is loader.collate_fn
    for epoch in range(2):
        if hasattr(part.batch_sampler, "set_epoch"):
            part.batch_sampler.set_epoch(epoch)
        elif compat.size() == 1 and hasattr(part.sampler, "set_epoch"):
            part.sampler.set_epoch(epoch)
        for rows, targets in part:
            yield rows, targets


errors = said["errors"] = []
errors.append(told(lambda: list(compat.shard(DataLoader(dataset, 8, shuffle=True)))))

loaders = {
    "in order": DataLoader(dataset, 8),
    "of processes": DataLoader(dataset, 8, shuffle=True, num_workers=2),
    "shuffled": DataLoader(dataset, 8, shuffle=True),
    "dropped": DataLoader(dataset, 8, shuffle=True, drop_last=True, generator=seeded()),
    "replaced": DataLoader(dataset, 7, sampler=RandomSampler(dataset, True, 20, seeded())),
    "own": DataLoader(dataset, 8, sampler=Shuffled(1)),
    "own batches": DataLoader(dataset, batch_sampler=[[3, 1, 4], [5, 9, 2, 6, 8], [7, 0]]),
}
for name, loader in loaders.items():
    model = made(Module)
    torch.manual_seed(7 + compat.rank())  # rank 0's is that of one process
    train(name, model, mse(model), batches=lambda: epochs(loader))

dense_model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))]))
dense_model.compile("sgd", "mse")
torch.manual_seed(5 + compat.rank())
dense_model.fit(compat.shard(loaders["shuffled"]), epochs=2, verbose=0)
weights["keras"] = dense_model.get_weights()

if compat.size() > 1:
    import threading

    from torch.utils.data import DistributedSampler

    def elsewhere():
        thread = threading.Thread(target=list, args=(compat.shard(loaders["shuffled"]),))
        thread.start()
        thread.join()

    part = compat.shard(DataLoader(dataset, 10))
    said["lengths"] = [len(part), part.batch_size, len(list(part))]
    own = BatchSampler(Shuffled(compat.rank()), 8, False)
    for call in (
        elsewhere,
        lambda: list(compat.shard(DataLoader(dataset, 10))),
        lambda: list(compat.shard(DataLoader(dataset, batch_sampler=[[1], [2, 3]]))),
        lambda: list(compat.shard(DataLoader(dataset, batch_sampler=own))),
        lambda: compat.shard(DataLoader(Rows(), 8)),
        lambda: compat.shard(DataLoader(dataset, None)),
        lambda: compat.shard(DataLoader(dataset)),
        lambda: compat.shard(DataLoader(dataset, 8), 9),
        lambda: compat.shard(DataLoader(dataset, 8, sampler=DistributedSampler(dataset, 2, 0))),
        lambda: compat.shard(part),
    ):
        errors.append(told(call))
"""


@pytest.mark.row("shard() of a DataLoader of torch")
def test_loaders_give_each_rank_its_part_of_one_process_s_batches(jobs):
    for each in ranks.check_same(jobs, "loaders"):
        assert each["lengths"] == [2, 5, 2]
        no_order = (
            "The ranks cannot agree on the order of a shuffled DataLoader {}: each may draw "
            "another one, so that they train on some rows several times and on others never. Call "
            "compat.parallelize() first, and iterate in the main thread."
        )
        left_out = "A batch of 1 rows is left out: they are too few for one on each of 2 ranks."
        no_numbers = (
            "InvalidArgumentError: shard() cannot split the batches of this DataLoader: it does "
            "not choose rows by their numbers (its dataset is an IterableDataset, or batch_size is "
            "None). Have the dataset give each rank its part, with compat.rank() and compat.size()."
        )
        assert each["errors"] == [
            [no_order.format("before they have joined")],
            [no_order.format("outside of the main thread")],
            [left_out],
            [left_out],
            "RankError: DataLoader gives other batches on rank 1 of 2 than on rank 0. Each rank "
            "takes its rows of the same batches, in the same order: seed what is shuffled or made "
            "at random, with one seed for all ranks.",
            no_numbers,
            no_numbers,
            "InvalidArgumentError: A batch of 1 rows is too small for 2 ranks. Use 2 rows or more.",
            "InvalidArgumentError: shard(batch_size=9) was given batches of 8 rows. Leave "
            "batch_size out: what comes in batches has its own.",
            "InvalidArgumentError: The sampler of the DataLoader given to shard() has rows for "
            "this rank alone already, as a DistributedSampler has. Use the DataLoader as it is, or "
            "give it a sampler for one process.",
            "InvalidArgumentError: shard() was given what it has returned before: this rank's "
            "part. Call it once.",
        ]


# Whatever backward passes there are.
PASSES = """
class Checkpointed(Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for part in self.stack[:2], self.stack[2:], nn.Tanh():
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x + 0.1 * self.stack(x.expand(-1, 6))


for reentrant in (False, True):
    model = made(lambda: Checkpointed(reentrant))
    train("checkpoint %s" % reentrant, model, mse(model))

model = made(Module)


def parts(rows, targets):
    return [mse(model)(rows, targets), model(rows).abs().mean()]


def accumulate(losses):
    for loss in losses:
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


train("accumulated and clipped", model, parts, back=accumulate)
model = made(Module)


def twice(loss):
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


train("graph retained", model, mse(model), back=twice)
model = made(Module)


def penalty(rows, targets):
    rows.requires_grad_()
    output = model(rows)
    slope, = torch.autograd.grad(output.sum(), rows, create_graph=True)
    return ((output - targets) ** 2).mean() + (slope ** 2).sum(1).mean()


train("gradient penalty", model, penalty)


class Branches(Module):
    "Of the rows in a batch of 8 only the last four, rank 1's, use the branch."

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(6, 1)
        self.never = nn.Linear(6, 1)

    def forward(self, x):
        output, chosen = super().forward(x), x[:, 0] > 0
        if chosen.any():
            output = output + torch.zeros_like(output).index_put(
                (chosen.nonzero()[:, 0],), self.branch(x[chosen])
            )
        return output


chosen = x.copy()
chosen[:, 0] = np.where(np.arange(len(x)) % 8 < 4, -1, 1)
model = made(Branches)
adam = torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)
train("unused", model, mse(model), adam, batches=lambda: list(batches(chosen)))
assert model.never.weight.grad is None

model = made(lambda: Module().double())
x64 = x.astype("float64")
y64 = x64.sum(axis=1, keepdims=True)
train("float64", model, mse(model), batches=lambda: list(batches(x64, y64)))


class Mixed(Module):
    "Parameters of other types of number, too."

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1))
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x):
        factor = self.one * self.wide.float() * (self.complex * (1 + 2j)).abs().mean()
        return super().forward(x) * factor


model = made(Mixed)
train("several types", model, mse(model))
model = made(lambda: Module().bfloat16())
for rows, targets in batches():
    mse(model)(rows.bfloat16(), targets).backward()
said["bfloat16"] = [parameter.grad.float().flatten().tolist() for parameter in model.parameters()]


class Sequences(nn.Module):
    "Time comes first, as torch's recurrent layers and transformers have it."

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.dense = nn.Linear(2, 1)

    def forward(self, x):
        result = self.layer(x)
        return self.dense((result[0] if isinstance(result, tuple) else result).mean(0))


def sequences():
    for rows, targets in batches():
        yield rows.view(-1, 3, 2).transpose(0, 1).contiguous(), targets


encoder = lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0), 1, enable_nested_tensor=False
)
model = made(lambda: Sequences(encoder()))
train("encoder", model, mse(model), batches=sequences)
model = made(lambda: nn.GRU(2, 1))
train("gru", model, lambda rows, targets: ((model(rows)[0].sum(0) - targets) ** 2).mean(),
      batches=sequences)
model = made(lambda: nn.GRU(2, 1))


def packed(rows, targets):
    lengths = [2] * rows.shape[1]
    hidden = model(nn.utils.rnn.pack_padded_sequence(rows, lengths))[1]
    return ((hidden[0] - targets) ** 2).mean()


train("packed", model, packed, batches=sequences)


model = made(Module)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1)
sgd = torch.optim.SGD(model.parameters(), 0.05)
sgd_step = sgd.step
overflow = x.copy()
overflow[14] = 1e38  # of rank 1, in the second batch
sgd.step = lambda: (scaler.step(types.SimpleNamespace(
    step=sgd_step, param_groups=sgd.param_groups)), scaler.update())
scales = []


def scaled(loss):
    scaler.scale(loss).backward()
    scales.append(scaler.get_scale())


train("scaled", model, lambda rows, targets: (model(rows) * rows.abs().max(1)[0][:, None]).mean(),
      sgd, batches=lambda: list(batches(overflow)), back=scaled)
said["scales"] = scales + [scaler.get_scale()]
"""


def test_every_kind_of_backward_pass_gives_one_processs_gradients(jobs):
    ((one,), _), (both, said) = (job["passes"] for job in jobs)
    ranks.check_arrays(one, *both)
    wide = {key: value for key, value in one.items() if key.startswith("float64")}
    assert wide["float64-0"].dtype == "float64"
    ranks.check_arrays(wide, *both, tolerance=1e-13)
    assert [each["scales"] for each in said] == [[1024.0, 2048.0, 1024.0, 2048.0]] * 2
    assert said[0]["bfloat16"] == said[1]["bfloat16"]


# Backward passes of other threads, which are under way at the same time.
THREADS = """
import contextlib, threading


@contextlib.contextmanager
def beside(loss_and_value):
    "Within, another thread is in the backward pass of a loss, where it comes to a value."
    reached, ends = threading.Event(), threading.Event()

    def run():
        loss, value = loss_and_value()

        def hold(gradient):
            reached.set()
            ends.wait(60)

        value.register_hook(hold)
        loss.backward()

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(60)
    try:
        yield
    finally:
        ends.set()
        thread.join()


def of_no_rank():
    "A loss over three targets, of a model that belongs to this process alone."
    value = nn.Linear(6, 4)(torch.ones(3, 6))
    return nn.functional.cross_entropy(value, torch.tensor([0, 1, 2])), value


def back(loss):
    with beside(of_no_rank):
        loss.backward()


model = made(Module)
train("beside", model, mse(model), back=back)

if compat.size() > 1:
    rows, targets = next(batches())
    model, other = made(Module), made(stack)

    def of_ranks():
        "That of another model, whose last layer autograd has come to."
        value = other[:2](rows)
        return mse(other[2:])(value, targets), value

    def at_once():
        with beside(of_ranks):
            mse(model)(rows, targets).backward()

    said["at once"] = told(at_once)
    train("afterwards", model, mse(model))
    weights.pop("afterwards")
"""


def test_a_backward_pass_of_another_thread_is_another_pass(jobs):
    """Each has its own loss; and what two of ranks would exchange in any order is refused."""
    said = ranks.check_same(jobs, "threads")
    error = (
        "UnsupportedError: Two threads run backward passes at once, of Sequential and of Module, "
        "whose gradients ranks exchange. Each rank may do that in another order. Run one backward "
        "pass after the other: in one thread, or in an order that is the same on all ranks."
    )
    assert [each["at once"] for each in said] == [error] * 2


# Losses that are divided by the targets that count, of which each rank has others.
TARGETS = """
F = nn.functional
labels = np.arange(21) * 7 % 4
labels[[1, 2, 4, 16, 17]] = -100
labels[[12, 13, 14, 15]] = -100  # all of rank 1's in the second batch
classes = torch.tensor([0.2, 1.0, 3.0, 0.5])


class WithLoss(Module):
    def forward(self, x, targets):
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, targets), "logits": logits}


class Normalised(Module):
    def __init__(self, units):
        super().__init__(units)
        self.normalise = nn.BatchNorm1d(6, affine=False)

    def forward(self, x):
        self.normalise(x)
        return super().forward(x)


def of(loss, kind=Module):
    model = made(lambda: kind(4))
    return model, lambda rows, targets: loss(model(rows), targets)


def two_heads(y, t):
    return (F.cross_entropy(y, t) + F.nll_loss(F.log_softmax(2 * y, 1), t)) / 2


def pictures(y, t):
    y, t = y[:, :, None, None].expand(-1, -1, 2, 1), t[:, None, None].expand(-1, 2, 1)
    return F.cross_entropy(y, t)


def labelled():
    return list(batches(x, labels))


cases = {
    "ignored": of(lambda y, t: F.cross_entropy(y, t)),
    "weighted": of(nn.CrossEntropyLoss(classes)),
    "accumulated": of(lambda y, t: F.cross_entropy(y, t, classes) / 4),
    "two heads": of(two_heads),
    "pictures": of(pictures),
    "normalised": of(nn.CrossEntropyLoss(classes), Normalised),
}
for name in cases:
    train(name, *cases[name], batches=labelled)
del weights["normalised"][5:]  # a moving variance is the mean of the ranks' variances
model = made(lambda: WithLoss(4))
train("own loss", model, lambda rows, targets: model(rows, targets)["loss"], batches=labelled)


def on_rank_0_alone(y, t):
    return F.cross_entropy(y, t) if compat.is_chief() else y.square().mean()


differ = of(on_rank_0_alone)
said["error"] = told(lambda: train("differ", *differ, batches=lambda: labelled()[:1]))
weights.pop("differ", None)
"""


def test_losses_are_divided_by_the_targets_of_all_ranks(jobs):
    for each in ranks.check_same(jobs, "targets"):
        assert each["error"] == (
            "RankError: Some ranks divide the loss of Module by their targets that count, and "
            "others do not, so that their gradients cannot be weighted. Have all ranks compute the "
            "same loss."
        )


# Losses of which autograd's graph tells by what they are divided. The last batch is uneven.
REDUCED = """
F = nn.functional
row_weights = torch.tensor(random.uniform(0.1, 1.0, (21, 1)).astype("float32"))
row_weights[4:8] *= 5  # rank 1's rows of the first batch
labels = torch.tensor(np.arange(21) // 3 % 4)
chosen = torch.tensor(np.arange(21) > 1)  # not two rows of rank 0's, of the first batch
extra = row_weights, labels, chosen


def reduced(name, loss, units=1, count=1):
    model, found = made(lambda: stack(units)), lambda: parts(count)
    loss_of = lambda x, given: loss(model, x, *given)
    said[name] = told(lambda: train(name, model, loss_of, batches=found))


def parts(count):
    others = zip(*[[each for _, each in batches(y=values.numpy())] for values in extra])
    return [(rows, (y,) + more) for (rows, y), more in zip(batches(), others)][:count]


def of_all(values):
    "The sum of a number over all ranks, and this rank's share of the rows."
    totals = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    if compat.size() > 1:
        torch.distributed.all_reduce(totals)
    return totals[0], len(values) / totals[1]


def divided(model, x, y, weight, label, mask):
    total, share = of_all(weight)
    return ((model(x) - y) ** 2 * weight).sum() / (total * share)


def penalised(model, x, y, weight, label, mask):
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return ((model(x) - y) ** 2).mean(0).sum() + 0.1 * penalty


# What is one process's loss: nothing is told, and the numbers are the same.
reduced("divided", divided, count=3)
reduced("penalised", penalised, count=3)
reduced("by length", lambda f, x, y, w, t, m: ((f(x) - y) ** 2).sum() / len(x), count=3)
reduced("weighted", lambda f, x, y, w, t, m: ((f(x) - y) ** 2 * w).mean(), count=3)
reduced("stacked", lambda f, x, y, w, t, m: torch.stack([F.mse_loss(f(x), y)] * 2).sum(), count=3)
same = dict(weights)


def mixed(f, x, y, w, t, m):
    "In a proportion that each rank draws."
    part = 0.3 + 0.2 * compat.rank()
    return part * F.cross_entropy(f(x), t) + (1 - part) * F.cross_entropy(f(x), t.flip(0))


reduced("mixed", mixed, 4)
# What is not.
reduced("row weights", lambda f, x, y, w, t, m: ((f(x) - y) ** 2 * w).sum() / w.sum())
reduced("mask", lambda f, x, y, w, t, m: F.mse_loss(f(x)[m], y[m]))
reduced("two parts", lambda f, x, y, w, t, m: F.mse_loss(f(x[m]), y[m]) + f(x).square().mean())
reduced("root", lambda f, x, y, w, t, m: F.mse_loss(f(x), y).sqrt())
numbers = torch.arange(4.0)
reduced("terms", lambda f, x, y, w, t, m: F.cross_entropy(f(x), t, numbers) + f(x).mean(), 4)
reduced("sum", lambda f, x, y, w, t, m: F.mse_loss(f(x), y, reduction="sum"))
reduced("within", lambda f, x, y, w, t, m: ((f(x) - y) ** 2 * (w / w.sum())).sum())
weights = same

model = made(Module)
taken = {name: parameter.detach() for name, parameter in model.named_parameters()}
by_inputs = torch.func.grad(lambda rows: model(rows).sum())  # of no parameter
said["of inputs"] = told(lambda: by_inputs(torch.ones(2, 6)))


def loss_of(parameters):
    return torch.func.functional_call(model, parameters, torch.ones(2, 6)).sum()


said["torch.func"] = told(lambda: [torch.func.grad(loss_of)(taken) for _ in range(2)])
"""


def test_losses_that_are_not_one_processs_are_told(jobs):
    """By rank 0, once; whether a sum or mean counts alike on all ranks is what the graph tells."""
    chief, other = ranks.check_same(jobs, "reduced")
    assert not any(other.values())
    by_ratio = {"row weights": {}, "mask": {}, "two parts": {}, "root": {}, "terms": {}}
    for name in by_ratio:
        (text,) = chief.pop(name)
        found = re.search("as ([0-9.]+) to ([0-9.]+), ", text)
        by_ratio[name] = float(found.group(1)) / float(found.group(2))
        assert text.replace(found.group(), "as A to B, ") == (
            "The loss of Sequential counts a row of rank 0 and a row of rank 1 as A to B, and one "
            "process would count all rows alike. Each rank divides by a number of its own, such "
            "as the sum of its row weights or of its mask, or it takes a root or another function "
            "of its mean. So the ranks train to other numbers than one process. Divide by the "
            "number of all ranks, from torch.distributed.all_reduce(), times this rank's share of "
            "the rows."
        )
    assert by_ratio["row weights"] > 2 and by_ratio["mask"] == pytest.approx(2, rel=0.01)
    (text,) = chief.pop("sum")
    assert [text] == chief.pop("within")
    assert text == (
        "The loss of Sequential is a sum over the rows of a batch. Ranks train with the mean of "
        "their gradients, which of a sum is 1/2 of one process's. Divide the sum by the number of "
        "rows. If what it sums up is divided already, such as by the sum of row weights, then "
        "divide by that of all ranks, from torch.distributed.all_reduce(), times this rank's share "
        "of the rows."
    )
    assert chief.pop("torch.func") == [
        "Gradients of the parameters of Module that torch.func computes are those of each rank's "
        "own rows. Before you update parameters with them, average them over the ranks with "
        "torch.distributed.all_reduce(), or use loss.backward(), whose gradients are averaged."
    ]
    assert not any(chief.values())


# Steps of Keras, verified: each as one process does it, of the rows of all ranks.
OWN_STEPS = """
import torch


def stack():
    hidden = dense(5, activation="tanh")
    return keras.Sequential([keras.layers.Input((6,)), hidden, dense(1)], name="stack")


class Own(keras.Model):
    "With steps of its own."

    def __init__(self):
        super().__init__(name="own")
        self.stack = stack()

    def call(self, rows):
        return self.stack(rows)

    def update(self, loss, count):
        self.zero_grad()
        loss.backward()
        variables = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([each.value.grad for each in variables], variables)
        self._loss_tracker.update_state(loss, sample_weight=count)
        return {"loss": self._loss_tracker.result()}
"""

VERIFIED = OWN_STEPS
VERIFIED += """
from compat._runtime.process import process


class Reduces(Own):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def train_step(self, data):
        rows, targets = data
        loss = self.reduce((self(rows) - targets) ** 2, rows[:, :1].abs())
        return self.update(loss, len(rows))


def trained(name, build, verify=2):
    process.configuration.settings.verify = verify
    model = compat.parallelize(build())
    model.compile("adam", "mse")
    said[name] = told(lambda: model.fit(inputs, targets, rows, 2, shuffle=False, verbose=0))
    return model.get_weights()


weights["plain"] = trained("plain", stack, 0)
weights["verified"] = trained("verified", stack)
trained("mean", lambda: Reduces(lambda losses, weight: (losses * weight).mean()))
said["records"] = [[each.model, each.steps["train"]] for each in process.verified]
said["largest"] = max(each.largest[0] for each in process.verified)
dropout = keras.layers.Dropout(0.5)
trained("random", lambda: keras.Sequential([keras.layers.Input((6,)), dropout, dense(1)]))
said["uncompared"] = process.verified[-1].uncompared["train"]
# What no graph of autograd's tells.
trained("within", lambda: Reduces(lambda losses, weight: (losses * weight / weight.mean()).mean()))
trained("across", lambda: Reduces(lambda losses, weight: losses.std()))
process.configuration.settings.verify = 0
"""


def test_steps_of_keras_are_verified_against_one_process(jobs):
    (chief, other), said = jobs[1]["verified"]
    for key in chief:
        np.testing.assert_array_equal(chief[key], other[key])
        np.testing.assert_array_equal(chief[key.replace("plain", "verified")], chief[key])
    text = (
        "ResultsDifferError: The first thing that differs when model 'own' does a training step as "
        "2 ranks and as one process is A, where rounding explains at most B. A loss or an "
        "operation that is not a mean over the rows of the batch: a sum, a mean over masked rows "
        "only, or one that compares rows with one another. The model is as it was before the step. "
        "Change the model, or run it by one process: COMPAT_ALONE=1; verify=0 goes on without "
        "looking."
    )
    for each in said:
        assert each.pop("records") == [["stack", 2], ["own", 2]]
        assert 0 < each.pop("largest") < 1e-4
        assert each.pop("uncompared")["reason"] == "layer 'dropout' draws random numbers"
        assert sorted(name for name in each if each[name]) == ["across", "within"]
        for name in ("across", "within"):
            found = re.sub(" is (slot|weight) .*?, where", " is A, where", each[name])
            assert re.sub("most [^ ]*[.] A", "most B. A", found) == text


# When gradients are sent.
BUCKETS = """
events = []
all_reduce = torch.distributed.all_reduce


def logged(tensor, *args, **kwargs):
    if kwargs.get("async_op"):  # of gradients
        events.append(len(tensor))
    return all_reduce(tensor, *args, **kwargs)


torch.distributed.all_reduce = logged


class Deep(Module):
    "The gradients of the first layer come last."

    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
        self.before_last = lambda: events.append("last")

    def forward(self, x):
        first = self.stack[0](x)
        if first.requires_grad:
            first.register_hook(lambda gradient: self.before_last())
        return self.stack[1:](first)


def logs(name, model, loss, back=lambda loss: loss.backward()):
    said[name] = []

    def log(loss):
        del events[:]
        back(loss)
        said[name].append(list(events))

    train(name, model, loss, back=log)


model = made(Deep)
logs("one call", model, mse(model))
model = made(Deep)
logs("two calls", model, lambda *batch: mse(model)(*batch) + model(batch[0]).abs().mean())
model = made(Deep)


def calls_by_the_way(rows, targets):
    model(rows)
    return mse(model)(rows, targets)


logs("a call by the way", model, calls_by_the_way)


def double():
    events.append("last")
    model.stack[-1].bias.grad *= 2


model = made(Deep)
model.before_last = double
logs("changed when it was sent", model, mse(model))
model = made(Deep)
model.stack[-1].bias.register_post_accumulate_grad_hook(
    lambda bias: [None, bias.grad.data.clamp_(-0.02, 0.02)][0]
)
logs("changed at the end", model, mse(model))

# Rank 0 fails in a pass, has sent a part, and does it again. The other does it once.
model = made(Deep)
fails = []


def fail():
    if fails:
        raise MemoryError(fails.pop())


def tried_twice(rows, targets):
    if compat.rank():
        return mse(model)(rows, targets)
    fails.append("for once")
    try:
        mse(model)(rows, targets).backward()
    except MemoryError:
        model.zero_grad()
    return mse(model)(rows, targets)


model.before_last = fail
train("tried twice", model, tried_twice)

one, two = made(Deep), made(Deep)
both = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.05)


def in_another_order(rows, targets):
    "Autograd comes first to what was called last."
    order = (one, two) if compat.rank() else (two, one)
    return sum(mse(model)(rows, targets + (model is two)) for model in order)


train("two models", one, in_another_order, both)
keep("the other", two)
"""


def test_gradients_leave_while_others_are_computed_and_each_is_sent_as_it_is_at_the_end(jobs):
    ((one,), _), (both, said) = (job["buckets"] for job in jobs)
    ranks.check_arrays(one, *both)
    # Six numbers, forty, and what comes last, with a header of 16.
    early, late = [6, 40, "last", 65], ["last", 6, 40, 65]
    for each in said:
        assert each == {
            "one call": [early] * 3,
            "two calls": [["last"] + early] * 3,
            "a call by the way": [late] * 3,
            "changed when it was sent": [early + [6], late, late],
            "changed at the end": [early] * 3,
        }


# Ranks that drift apart, each in another way. In one process they are all as good as any.
DRIFTING = """
def drifts(name, model, back=lambda loss: loss.backward()):
    said[name] = told(lambda: [train(name, model, mse(model), back=back) for _ in range(3)])
    weights.clear()


def by_hand(loss):
    model.zero_grad()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = gradient


model = made(Module)
drifts("autograd.grad", model, by_hand)


def at_once(parameter):
    parameter.data -= 0.01 * parameter.grad
    parameter.grad = None


model = made(Module)
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(at_once)
drifts("update in the backward pass", model)

model = made(Module)
for parameter in model.parameters():
    nn.init.normal_(parameter)
drifts("initial value", model)



class Sums(Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))



def count(loss):
    model.total += loss.detach()
    loss.backward()


model = made(Sums)
drifts("buffer", model, count)

said["other shapes"] = told(lambda: compat.parallelize(nn.Linear(3, 2 + compat.rank())))

model = made(Module)
same = [(torch.tensor(x), torch.tensor(y))]
said["same rows"] = told(lambda: train("same", model, mse(model), batches=lambda: same))
weights.clear()
"""


def test_ranks_that_drift_apart_are_told_and_the_first_variable_is_named(jobs):
    _, said = jobs[1]["drifting"]
    drifted = (
        "RankError: The ranks have drifted apart: {} the values of {} on rank 1 of 2 are not those "
        "of rank 0. Ranks train to one process's numbers as long as these are the same. "
    )
    buffer = drifted + (
        "Each rank computes this buffer from its own rows; ranks merge what forward() sets buffers "
        "to, unless it calls torch.distributed by itself. Sum or average the buffer by "
        "torch.distributed.all_reduce(), or, if it is each rank's own, register it with "
        "persistent=False."
    )
    drifted += (
        "Likely causes: gradients that never reach the other ranks, such as those of "
        "torch.autograd.grad() or of an update made by hand; an initial value drawn at random "
        "after parallelize(); code that depends on a rank's data, such as a step that is skipped."
    )
    assert [one.pop("other shapes") for one in said] == [
        [],
        "RankError: Model 'Linear' has other weights on rank 1 than on rank 0: their number or "
        "their shapes differ. Build the same model, and compile it with the same optimizer, on "
        "every rank.",
    ]
    assert [one.pop("same rows") for one in said] == [
        [
            "All 2 ranks train 'Module' on the same rows, so that an epoch takes as long as in one "
            "process: call compat.shard(), as in x, y = compat.shard((x, y)), which gives each "
            "rank its own. (Ignore this if their batches are meant to be the same.)"
        ],
        [],
    ]
    all_four, at_once = "'stack.0.weight' and 3 others", "before the first update"
    for one in said:
        assert one == {
            "autograd.grad": drifted.format("after 1 step", all_four),
            "update in the backward pass": [],  # of the mean over all ranks
            "initial value": drifted.format(at_once, all_four),
            "buffer": buffer.format(at_once, "'total'"),
        }


# What ranks do not have in common.
REFUSED = """
def refusal(name, model, loss=None):
    said[name] = told(lambda: train(name, model, loss or mse(model)))
    weights.clear()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 1, sparse=compat.rank() == 0)

    def forward(self, x):
        return self.table(x.abs().long()).mean(1)


refusal("sparse", made(Table))
model = made(Module)
refusal("rows", model, mse(model if compat.rank() else model.stack))
model = made(Module)
refusal("nothing", model)
said["weights"] = [parameter.tolist() for parameter in model.parameters()]
"""


def test_what_ranks_do_not_have_in_common_is_an_error(jobs):
    _, said = jobs[1]["refused"]
    assert said[0] == said[1]
    assert len(said[0].pop("weights")) == 4
    assert said[0] == {
        "sparse": "UnsupportedError: A gradient of Table is sparse, which ranks cannot exchange. "
        "Make the embedding with sparse=False.",
        "rows": "RankError: Some ranks have called Module with a batch in this backward pass, and "
        "others have not, so that their gradients cannot be weighted by rows. Have all ranks do "
        "the same.",
        "nothing": [],
    }


NEVER_COME = """
import time, compat
time.sleep(100 if compat.rank() else 0)
import torch
compat.configure_gpu(gpus="cpu", backend="torch")
compat.parallelize(torch.nn.Linear(2, 1))
"""


@slow
def test_ranks_that_never_come_are_named(tmp_path):
    said = ranks.what_a_failed_job_says(tmp_path, "torch", NEVER_COME, timeout=5)
    told = (
        r"waited to start \(script.py, line \d+\), but ranks 1 and 2 failed, ended or did not "
        "come: wait timeout after 5000ms. Look at what ranks 1 and 2 printed."
    )
    assert re.search(told, said)
    named = "compat run: rank [12] of 3 did not come to the others, which waited for it; the others"
    assert re.search(named, said)


# State that is right without an error, and what each rank may have for itself.
STATE = """
class Normalised(Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(6, affine=False)
        self.second = nn.BatchNorm1d(6, affine=False, momentum=None)
        self.third = nn.SyncBatchNorm(6)
        self.frozen = nn.BatchNorm1d(6).eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros(()), persistent=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x):
        self.first(x), self.second(x), self.spectral(x), self.frozen(x)
        self.calls += 1
        self.own = x.detach().sum()
        return super().forward(x)


model = made(Normalised)
for _ in range(2):
    train("statistics", model, mse(model))
names = list(model.state_dict())
weights["means"] = [v for n, v in zip(names, weights["statistics"]) if "running_mean" in n]
weights["counters"] = [v for n, v in zip(names, weights["statistics"]) if v.dtype == "int64"]
assert (weights["counters"][0] == 6).all()
assert abs(weights["means"][0]).max() > 0.01
weights["statistics"] = [  # a variance is the mean of the ranks' variances
    v for n, v in zip(names, weights["statistics"])
    if n.startswith(("stack", "frozen")) or "spectral" in n
]

model = made(Module)
model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
lbfgs = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
rows, targets = next(batches())


def closure():
    lbfgs.zero_grad()
    loss = mse(model)(rows, targets) + 0.0 * model(rows).sum()
    loss.backward()
    return loss


for _ in range(2):
    model(rows)  # by the way
    lbfgs.step(closure)
"""


def test_running_statistics_are_the_mean_over_ranks_and_no_false_alarm_is_given(jobs):
    ranks.check_same(jobs, "state")


# Batch normalization of all ranks' samples.
NORMALIZED = """
from compat._runtime.process import process
from torch.nn.functional import batch_norm

SIZES = 61, 14, 2, 13, 5
of_steps = [np.random.RandomState(step).normal(size=(size, 6)) for step, size in enumerate(SIZES)]


def uneven(batches=of_steps):
    "A rank has twice as many rows as the other, which has none of a batch of two."
    for rows in batches:
        cut = -(-len(rows) // 3) * 2 if len(rows) > 2 else 2
        part = [slice(cut), slice(cut, None)][compat.rank()] if compat.size() > 1 else slice(None)
        rows = torch.tensor(rows[part])
        yield rows, rows.sum(1, keepdim=True)


def convolutional(kind=nn.BatchNorm2d):
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), kind(4), nn.ReLU(),
        nn.Conv2d(4, 4, 1), kind(4, momentum=None), nn.Flatten(), nn.Linear(8, 1))


def layers(kind=nn.BatchNorm1d):
    return nn.Sequential(
        nn.Linear(6, 5), kind(5), nn.Tanh(), nn.Linear(5, 5), kind(5, affine=False), nn.Tanh(),
        nn.Linear(5, 5), kind(5, track_running_stats=False), nn.Linear(5, 1))


class Wraps(nn.Module):
    def __init__(self, inner=layers):
        super().__init__()
        self.inner = inner()

    def forward(self, x):
        return self.inner(x)


class Calls(Wraps):
    "A function that it calls by itself."

    def forward(self, x):
        return super().forward(batch_norm(x, None, None, training=True))


class CallsLater(Wraps):
    "From its third pass on, by torch's operator, which modules of torch.export call."

    passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes > 2:
            operator = torch.ops.aten.batch_norm.default
            x = operator(x, None, None, None, None, True, 0.1, 1e-5, False)
        return super().forward(x)


class Recomputes(Wraps):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def calls(self, x):
        return self.inner(batch_norm(x, None, None, training=True))

    def forward(self, x):
        return checkpoint(self.calls, x.requires_grad_(), use_reentrant=self.reentrant)


def normalizing(build=layers, asked=True):
    torch.manual_seed(compat.rank())
    return compat.parallelize(build().double(), sync_batch_norm=asked)


def trains(name, build=layers, asked=True, loss=mse, batches=uneven):
    model = normalizing(build, asked)
    train(name, model, loss(model), batches=lambda: list(batches()))
    return model


def all_cases():
    trains("dense")
    trains("convolutional", convolutional)
    trains("by layer", lambda: layers(nn.SyncBatchNorm), None)
    trains("function", Calls)
    trains("recomputed", lambda: Recomputes(False))
    trains("recomputed in a pass", lambda: Recomputes(True))
    model = copy.deepcopy(normalizing())
    torch.save(model, io.BytesIO())
    train("copied", model, mse(model), batches=uneven)
    model = normalizing()
    compiled = torch.compile(model, backend="aot_eager")
    train("compiled", model, mse(compiled), batches=lambda: list(uneven())[:2])
    model = trains("before", lambda: nn.Sequential(nn.Linear(6, 1)))
    model.append(nn.BatchNorm1d(1, affine=False).double())
    train("after", model, mse(model), batches=uneven)
    trains("function later", CallsLater)
    nested()
    adversaries()


def nested():
    "One model has the layers of another; whichever was parallelized first."
    for order in 1, -1:
        torch.manual_seed(compat.rank())
        inner = layers().double()
        pair = inner, nn.Sequential(inner)
        for model in pair[::order]:
            compat.parallelize(model, sync_batch_norm=True)
        for number in 1, 0:
            some = list(uneven())[2 - 2 * number : 4 - 2 * number]
            name = "nested {} {}".format(number, order)
            train(name, pair[number], mse(pair[number]), batches=lambda: some)


def adversaries():
    "A discriminator has passes that do not train it, of as many rows as before or not."
    maker, judge = normalizing(lambda: nn.Linear(6, 6)), normalizing()
    made_by, judged_by = [torch.optim.SGD(each.parameters(), 0.05) for each in (maker, judge)]
    for rows, _ in uneven([of_steps[0], of_steps[1], of_steps[3]]):
        judge.zero_grad()
        (judge(maker(rows).detach()) - judge(rows)).mean().backward()
        judged_by.step()
        judge.requires_grad_(False)
        maker.zero_grad()
        judge(maker(rows)).mean().neg().backward()
        made_by.step()
        judge.requires_grad_(True)
    keep("maker", maker)
    keep("judge", judge)


said["warned"] = told(all_cases)
trains("off", asked=None, batches=lambda: uneven([of_steps[0]] * 3))
said["off"] = weights.pop("off")[0].tolist()


def penalty(model):
    def loss(rows, targets):
        rows.requires_grad_()
        output = model(rows)
        slope, = torch.autograd.grad(output.sum(), rows, create_graph=True)
        return ((output - targets) ** 2).mean() + (slope ** 2).sum(1).mean()

    return loss


def two_calls(model):
    "Of which the first one also moves averages, without gradients."

    def loss(rows, targets):
        with torch.no_grad():
            model(rows * 2)
        return mse(model)(rows, targets) + model(rows + 1).square().mean()

    return loss


def labelled():
    "All targets of rank 1 are ignored in the second batch."
    labels = np.arange(21) * 7 % 4
    labels[[1, 2, 4, 12, 13, 14, 15]] = -100
    return [(rows.double(), targets) for rows, targets in batches(x, labels)]


def classified(model):
    return lambda rows, targets: nn.functional.cross_entropy(
        model(rows).expand(-1, 4) * torch.arange(4.0), targets)


without_none = lambda: list(uneven([each for each in of_steps if len(each) > 2]))
trains("penalty", loss=penalty, batches=without_none)
model = trains("two calls", loss=two_calls)
trains("targets", loss=classified, batches=labelled)
model.eval()
if compat.is_chief():  # in inference a rank may call it alone
    model(torch.ones(3, 6).double())
model.train()

if compat.size() > 1:
    model, (rows, targets) = normalizing(), next(uneven())

    def alone():
        if compat.is_chief():
            with torch.no_grad():
                model(rows)
        mse(model)(rows, targets).backward()

    said["alone"] = told(alone)
    model.zero_grad()

    def other_shares():
        "Of two calls this pass comes to one."
        unused = model(rows[: 5 + 20 * compat.rank()])
        mse(model)(rows, targets).backward()

    said["shares"] = told(other_shares)

    class Own(nn.BatchNorm1d):
        def forward(self, rows):
            return (rows - rows.mean(0)) / rows.std(0)

    said["own"] = told(lambda: normalizing(lambda: layers(Own))(rows))

    class Native(Wraps):
        def forward(self, x):
            x, _, _ = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
            return super().forward(x)

    said["native"] = told(lambda: normalizing(Native)(rows))
    said["scripted"] = told(lambda: normalizing(lambda: Wraps(lambda: torch.jit.script(layers()))))

    # Where a host waits for a device: it reads a result, and reports that it waits.
    (engine,), read, waits = process.engines.values(), torch.Tensor.tolist, []
    torch.Tensor.tolist = lambda self: [waits.append(engine.inside), read(self)][1]
    mse(normalizing())(rows, targets).backward()
    torch.Tensor.tolist, said["waits"] = read, waits
"""


def test_batch_normalization_has_the_samples_of_all_ranks(jobs):
    """Losses, weights and averages, in float64; with the option off they differ."""
    ((one,), (alone,)), (both, said) = (job["normalized"] for job in jobs)
    ranks.check_arrays(one, *both, tolerance=1e-12)
    assert alone["warned"] == said[0]["warned"] == said[1]["warned"] == []
    assert np.abs(np.subtract(alone["off"], said[0]["off"])).max() > 1e-4
    assert [each["alone"] for each in said] == [
        "RankError: Batch normalization of all ranks' samples needs all ranks in the same pass, "
        "and they are in different ones: rank 0 in a forward pass without gradients, rank 1 in a "
        "forward pass. Have each call the model in training for the same batches, in the same "
        "order. In inference (model.eval()) a rank may call it alone."
    ] * 2
    for each in said:
        assert each["shares"] == [
            "Batch normalization of Sequential uses the samples of all ranks. Its gradients were "
            "weighted by the rows of all calls of the model since the last backward pass, and this "
            "pass does not come to all of them, of which ranks have different shares. So the ranks "
            "train to other numbers than one process. Call backward() after each call of the "
            "model, or give every rank the same number of rows."
        ]
        assert set(each["own"]) == {
            "A layer Own does not normalize by torch.nn.functional.batch_norm(), so that it has "
            "the statistics of each rank's own samples unless it exchanges them by itself."
        }
        (native,) = each["native"]
        assert re.sub("<.*>", "", native) == (
            "Native is to normalize by the statistics of the whole batch, and calls , which uses "
            "those of each rank's samples. Call torch.nn.functional.batch_norm()."
        )
        assert each["scripted"] == [
            "Model 'Wraps' is to normalize by the statistics of the whole batch "
            "(sync_batch_norm=True), which torch cannot do on several ranks: each rank uses those "
            "of its own samples in layers 'inner.1', 'inner.4', 'inner.7'."
        ]
        assert len(each["waits"]) > 6 and all(each["waits"])


# Keras ----------------------------------------------------------------------------------------

KERAS = OWN_STEPS
KERAS += """
def trained(name, model):
    assert compat.parallelize(model) is model
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    history = model.fit(inputs, targets, rows, 2, shuffle=False, verbose=0)
    weights[name] = model.get_weights()
    said[name] = history.history
"""
KERAS += ranks.NEAR_OVERFLOW
KERAS += """


class Tracks(keras.layers.Layer):
    "Keeps a moving average of its own."

    def build(self, shape):
        self.moving = self.add_weight(name="moving", initializer="zeros", trainable=False)

    def call(self, x):
        self.moving.assign(0.9 * self.moving + 0.1 * keras.ops.mean(x))
        return x


model = keras.models.Sequential([Tracks(name="tracks"), stack()], name="own")
said["warned"] = told(lambda: trained("tracks", model))
looped = compat.parallelize(keras.models.Sequential([Tracks(name="tracks"), stack()], name="loop"))
said["looped"] = told(lambda: (looped(torch.as_tensor(inputs[:rows])) ** 2).mean().backward())


class Parts(Own):
    "Trains by its parts, and is never called itself."

    def train_step(self, data):
        rows, targets = data
        first, last = self.stack.layers
        return self.update(keras.ops.mean((last(first(rows)) - targets) ** 2), len(rows))

    def call(self, rows):
        said["called"] = said.get("called", 0) + (not rows.is_meta)
        return super().call(rows)


class OneByOne(Own):
    "Two backward passes in a step."

    def train_step(self, data):
        rows, targets = data
        for part in range(2):
            loss = keras.ops.mean((self(rows)[:, 0] - targets[:, 0] * part) ** 2)
            logs = self.update(loss, len(rows))
        return logs


class Reporting(Own):
    "Returns the loss of the batch by the name of Keras' metric, which averages over batches."

    def train_step(self, data):
        rows, targets = data
        loss = keras.ops.mean((self(rows) - targets) ** 2)
        self.update(loss, len(rows))
        return {"loss": loss, "twice": 2 * loss}


trained("parts", Parts())
trained("one by one", OneByOne())
inputs, targets = inputs[: 2 * rows], targets[: 2 * rows]
trained("reporting", Reporting())
"""


def test_keras_trains_in_every_precision_and_by_any_step(jobs):
    ((one,), (alone,)), (both, said) = (job["keras"] for job in jobs)
    ranks.check_arrays(one, *both)
    assert alone["warned"] == said[0]["warned"] == said[1]["warned"] == []
    assert alone["looped"] == said[1]["looped"] == []
    (warned,) = said[0]["looped"]
    assert warned == (
        "Each rank sets 'loop/tracks/moving' from its own rows. All ranks get the mean, "
        "weighted by rows, which is one process's value for a moving average; it is not for a sum "
        "over rows. Divide such a sum by the number of rows."
    )
    for each in said:
        assert each["called"] == 0
        assert each["near"] == alone["near"] == [2.0**15, 2]
        for name in ("parts", "one by one"):
            assert each[name]["loss"] == pytest.approx(alone[name]["loss"], abs=1e-5)
        for name in ("loss", "twice"):
            assert each["reporting"][name] == pytest.approx(alone["reporting"][name], abs=1e-5)


KERAS_NORMALIZED = """
import torch
from compat._runtime.process import process

layers, floatx, policy = keras.layers, keras.config.floatx(), keras.config.dtype_policy()
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


def normalizing(first=(), last=(), by_layer=False, **options):
    "A layer asks by an attribute: Keras refuses the argument on torch."
    parts = [*first, layers.BatchNormalization(**options), *last]
    for part in parts:
        if isinstance(part, layers.BatchNormalization):
            part.synchronized = by_layer and compat.size() > 1
    return keras.Sequential([layers.Input((6,)), *parts, dense(1)], name="net")


class Block(layers.Layer):
    "Makes its layers in the first call of a model that does not build it before."

    def __init__(self, kind=layers.BatchNormalization):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.norm = self.kind(name="late")

    def call(self, x, training=None):
        return self.norm(x, training=training)


class Late(keras.Model):
    def __init__(self, *block):
        super().__init__(name="late")
        self.first, self.block, self.head = seeded(5), Block(*block), seeded(1)

    def build(self, shape):
        self.built = True

    def call(self, x, training=None):
        return self.head(self.block(self.first(x), training=training))

    def test_step(self, data):
        "Evaluates as it trains."
        loss = ((self(data[0], training=True) - data[1]) ** 2).mean()
        self._loss_tracker.update_state(loss, sample_weight=len(data[0]))
        return {"loss": self._loss_tracker.result()}


class Centers(layers.BatchNormalization):
    def call(self, x, training=None, mask=None):
        return x - keras.ops.mean(x, 0)


class Parts(keras.Model):
    "Calls a function of torch, in a step that does not call the model."

    def __init__(self):
        super().__init__()
        self.first, self.head = seeded(5), seeded(1)

    def call(self, x):
        x = torch.nn.functional.batch_norm(self.first(x), None, None, training=True)
        return self.head(x)

    def train_step(self, data):
        self.zero_grad()
        ((self.call(data[0]) - data[1]) ** 2).mean().backward()
        gradients = [variable.value.grad for variable in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {}


def seeded(units):
    "A layer with the same weights on all ranks, whenever they are made."
    initializer = keras.initializers.RandomUniform(-0.5, 0.5, seed=units)
    return layers.Dense(units, kernel_initializer=initializer)


def looped(name, *block):
    model = compat.parallelize(Late(*block), sync_batch_norm=True)
    for start in range(0, len(parts[0]), rows):
        batch = [torch.tensor(part[start : start + rows]) for part in parts]
        ((model(batch[0], training=True) - batch[1]) ** 2).mean().backward()
        for variable in model.trainable_variables:
            gradient, variable.value.grad = variable.value.grad, None
            if gradient is not None:
                with torch.no_grad():
                    variable.assign(variable - 0.1 * gradient)
    model.compile(loss="mse")
    losses = model.evaluate(*parts, rows, verbose=0)
    weights[name] = [*model.get_weights(), losses]


def wrapped():
    "A module of torch in a model whose last layer Keras builds in fit()."
    module = layers.TorchModuleWrapper(torch.nn.BatchNorm1d(6).double())
    return keras.Sequential([layers.Input((6,)), module, dense(1)])


kinds = {
    "parts": Parts,
    "wrapped": wrapped,
    "dense": lambda: normalizing([dense(5)], [layers.ReLU()]),
    "by layer": lambda: normalizing([dense(5)], by_layer=True),
    "renormalized": lambda: normalizing([dense(5)], renorm=True),
    "convolutional": lambda: normalizing(
        [layers.Reshape((2, 3, 1)), layers.Conv2D(4, 2)], [layers.Flatten()]),
    "masked": lambda: normalizing(
        [layers.Reshape((3, 2)), layers.Masking()], [layers.SimpleRNN(4)]),
}
masked = x.astype("float64")
masked[::3, 4:] = 0
parts = compat.shard((masked, y), BATCH)


def trained(name, asked=True):
    keras.utils.set_random_seed(compat.rank())
    model = compat.parallelize(kinds[name](), sync_batch_norm=asked)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.fit(*parts, rows, 2, shuffle=False, verbose=0)
    weights[name if asked or name == "by layer" else "off"] = model.get_weights()
    return model


def all_kinds():
    for name in kinds:
        trained(name, None if name == "by layer" else True)
    looped("looped")
    process.configuration.settings.verify = 2
    trained("dense")
    process.configuration.settings.verify = 0


said["warned"] = told(all_kinds)
verified = [each for each in process.verified if each.steps["train"] == 2][-1:]
said["verified"] = [sorted(each.incomparable.values()) for each in verified]
trained("dense", None)
said["off"] = weights.pop("off")[0].tolist()
model = trained("by layer", None)
if compat.is_chief():
    model.predict(masked, verbose=0)  # which exchanges nothing
said["late"] = told(lambda: looped("own", Centers))
weights.pop("own")
keras.config.set_floatx(floatx)
keras.config.set_dtype_policy(policy)
"""


def test_layers_of_keras_normalize_by_the_samples_of_all_ranks(jobs):
    """Weights and averages, in float64; with the option off they differ."""
    ((one,), (alone,)), (both, said) = (job["keras_normalized"] for job in jobs)
    ranks.check_arrays(one, *both)
    assert alone["warned"] == said[0]["warned"] == said[1]["warned"] == []
    assert np.abs(np.subtract(alone["off"], said[0]["off"])).max() > 1e-4
    for each in said:  # the gradient of a bias before batch normalization is 0 but for rounding
        assert set(each["verified"][0]) <= {"one device does not repeat it"}
        assert each["late"] == [
            "Model 'late' is to normalize by the statistics of the whole batch "
            "(sync_batch_norm=True), which torch cannot do on several ranks: each rank uses those "
            "of its own samples in layer 'late'."
        ]


KERAS_REFUSED = """
def compiled(loss="mse", **options):
    model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="net"))
    model.compile("sgd", loss, **options)
    return model


class Averaged(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="averaged")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(keras.ops.mean(y_pred))

    def result(self):
        return self.value + 0


model = compiled()
said["split"] = told(lambda: model.fit(inputs, targets, rows, validation_split=0.25, verbose=0))
model = compiled(keras.losses.MeanSquaredError(reduction="none"))
said["none"] = told(lambda: model.fit(inputs, targets, rows, verbose=0))
model = compiled(metrics=[Averaged()])
said["averaged"] = told(lambda: model.fit(inputs, targets, rows, verbose=0))
model = compiled(metrics=["mae"] * compat.rank())
said["metrics"] = told(lambda: model.evaluate(inputs, targets, rows, verbose=0))


def ends_early():
    for _ in range(3 - compat.rank()):
        yield inputs[:rows], targets[:rows]


# All ranks were told that an epoch has three batches.
model = compiled()
said["ends early"] = told(lambda: model.fit(ends_early(), steps_per_epoch=3, verbose=0))
"""


def test_what_keras_computes_otherwise_than_in_one_process_is_told(jobs):
    _, said = jobs[1]["refused_of_keras"]
    advice = "Give every rank the same number: compat.shard() does."
    assert [each.pop("ends early") for each in said] == [
        "RankLostError: Rank 0 of 2 has more batches, but rank 1 ran out of them after 2 batches. "
        + advice,
        "RankError: Rank 1 of 2 ran out of batches after 2 batches, but rank 0 had more. " + advice,
    ]
    assert said[0] == said[1]
    assert said[0] == {
        "split": [
            "validation_split=0.25 takes the last rows of each rank's part of the data, and not "
            "those that one process would take. Split the data first, then shard() both parts, and "
            "give validation_data."
        ],
        "none": "UnsupportedError: A loss with reduction='none' cannot train on several ranks: "
        "what becomes of its values is not known there. Use reduction='sum_over_batch_size' or "
        "'sum'.",
        "averaged": [
            "Metric 'averaged' is the mean of the ranks' values, weighted by their rows, and not "
            "what one process computes: its variable 'value' is not to be summed up: its "
            "aggregation is mean. For that have update_state() add to its variables with "
            "assign_add(), or a function return one value for each row."
        ],
        "metrics": "RankError: The ranks' metrics have different numbers of values: 2, 4, by rank. "
        "Compile the model with the same metrics on every rank, and call evaluate() on all of "
        "them.",
    }


def test_keras_metrics_and_losses_are_those_of_all_rows_and_what_cannot_be_is_told(jobs):
    # On torch Keras' own logs hold the metric's variable, which validation then sets.
    ranks.check_metrics(jobs, but=["hits"])
    ranks.check_losses(jobs)
    ranks.check_own_losses(jobs)
    ranks.check_late_drift(jobs)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the results of one process and two ranks for the programs above."""
    own = {"loaders": LOADERS, "buckets": BUCKETS, "calls": CALLS, "passes": PASSES}
    own.update(targets=TARGETS, reduced=REDUCED, state=STATE, drifting=DRIFTING, refused=REFUSED)
    own.update(hooks=HOOKS, threads=THREADS, normalized=NORMALIZED)
    programs = {name: BEGIN + program for name, program in own.items()}
    for_all = {"metrics": ranks.METRICS, "losses": "REDUCTIONS = True\n" + ranks.LOSSES}
    for_all.update(own_losses=ranks.OWN_LOSSES, late_drift=ranks.LATE_DRIFT)
    programs.update((name, ranks.of_keras_3(program)) for name, program in for_all.items())
    # The last one ends the exchange on a rank.
    programs.update(THREE_RANKS)
    programs.update(keras=KERAS, verified=VERIFIED, keras_normalized=KERAS_NORMALIZED)
    programs.update(refused_of_keras=KERAS_REFUSED)
    ranks_alone = ["own_losses", "late_drift", "verified", "refused_of_keras", *RANKS_ALONE]
    ranks_alone += ["drifting", "refused", "hooks"]
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), "torch", ranks_alone)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Return the results of three ranks for programs that run as two ranks and as three."""
    return ranks.run_all(THREE_RANKS, tmp_path_factory.mktemp("three"), 3, "torch")


def test_state_that_steps_of_keras_set_is_that_of_all_rows(jobs, three):
    for several in jobs[1], three:
        rank_state.check(jobs[0], several)


def test_buffers_that_forward_passes_set_are_those_of_all_rows(jobs, three):
    for several in jobs[1], three:
        rank_state.check_native(jobs[0], several)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs, three):
    for several in jobs[1], three:
        rank_decisions.check(several, "numbers")


SPLITS = """
import torch
from torch.utils.data import ConcatDataset, DataLoader, SubsetRandomSampler, TensorDataset
from torch.utils.data import random_split


def split(seed):
    dataset = ConcatDataset([TensorDataset(torch.tensor(x), torch.tensor(y))])
    generator = torch.Generator().manual_seed(seed)
    return random_split(dataset, [16, 5], generator=generator)[0]


def noisy(seed):
    noise = np.random.RandomState(seed).normal(size=x.shape).astype("float32")
    return TensorDataset(torch.tensor(x + noise), torch.tensor(y))


def drawing(seed):
    sampler = SubsetRandomSampler(np.random.RandomState(seed).permutation(21)[:16].tolist())
    return DataLoader(noisy(0), batch_size=BATCH, sampler=sampler)


def train(net, batches):
    for first, second in batches:
        torch.nn.functional.mse_loss(net(first), second).backward()


def loaders(seed):
    yield "split", DataLoader(split(seed), batch_size=BATCH)
    yield "noisy", DataLoader(noisy(seed), batch_size=BATCH)
    yield "drawn", drawing(seed)
    order = np.random.RandomState(seed).permutation(21)
    yield "arrays", [list(map(torch.tensor, (x[order], y[order])))]


for kind, seed in ("unseeded", compat.rank()), ("seeded", 0):
    said[kind] = {}
    for name, data in loaders(seed):
        net = compat.parallelize(torch.nn.Linear(6, 1))
        given = [compat.shard(data[0])] if name == "arrays" else compat.shard(data)
        said[kind][name] = told(lambda: train(net, given))
"""


# Those that only ranks run, and those that are run as three ranks, too.
RANKS_ALONE = dict(rank_decisions.programs("numbers"), splits=SPLITS)
THREE_RANKS = dict(RANKS_ALONE, steps_state=rank_state.STATE, buffers=rank_state.NATIVE)


@pytest.mark.parametrize("size", [2, 3])
def test_data_drawn_without_a_seed_before_shard_are_an_error_in_a_loop(jobs, three, size):
    for said in (jobs[1] if size == 2 else three)["splits"][1]:
        other = rank_decisions.OTHER.format("rank 1" if size == 2 else "ranks 1 and 2", size)
        names = ["arrays", "drawn", "noisy", "split"]
        assert sorted(said["unseeded"]) == sorted(said["seeded"]) == names
        few = "A batch of 2 rows is left out: they are too few for one on each of 3 ranks."
        for name in names:
            told = said["unseeded"][name]
            gives = told.startswith("RankError: DataLoader gives other batches on rank")
            assert told == other or name == "drawn" and gives, (name, told)
            assert said["seeded"][name] in ([], [few]), name
