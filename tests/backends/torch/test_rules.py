"""torch: each line of the table of functions, proved by computing with a batch and its parts."""

# ruff: noqa: B008 (a function for a case, which may be called after the next one is made)
import functools
import itertools
import operator
from unittest import mock

import missing_rules
import row_proof
import torch

from compat import _rows
from compat._backends.torch import expressions, graph, merging, rules
from compat._backends.torch.propagation import Propagation
from compat._backends.torch.reductions import CallReductions, ReplicaReductions

#: Needs a GPU.
UNPROVED = {"cuda"}


def x(*shape, seed=0):
    seed = sum(shape) + 100 * seed
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole_numbers(most, *shape):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(most))


def each(module, names, *inputs, **options):
    """Cases of functions that are given the same."""
    for name in names.split():
        function = getattr(module, name)
        yield name, inputs, lambda *given, f=function: f(*given, **options)


def drawn(module, names, *inputs, **options):
    """Cases of functions whose results are random: what counts is where the rows are."""
    for name, _, function in each(module, names, **options):
        yield name, inputs, lambda *given, f=function: f(*given).nan_to_num() * 0


def elementwise():
    F, T = torch.nn.functional, torch.Tensor
    bits = [whole_numbers(9, 3, 4), whole_numbers(8, 3, 4)]
    two = [x(3, 4), x(3, 4, seed=1).abs() + 0.5]
    yield from each(torch, "absolute negative", x(3, 4))
    yield from each(torch, "conj real imag", torch.complex(*two))
    yield from each(F, "relu hardswish logsigmoid softsign tanhshrink gelu silu", x(3, 4))
    for shapes in [(3, 4), (4,)], [(3, 1), (3,)], [(3, 3), (3,)]:  # the same: said_by_torch()
        given = [x(*shape, seed=seed).abs() + 0.5 for seed, shape in enumerate(shapes)]
        yield from each(torch, "add maximum pow", *given)
    yield from each(
        torch,
        "divide floor_divide greater greater_equal isclose less less_equal multiply not_equal "
        "subtract",
        *two,
    )
    yield "expand_as", [x(3, 1), x(3, 4)], lambda a, b: a.expand_as(b)
    for name in ("floordiv", "mod", "truediv", "pow", "sub"):
        function = getattr(operator, name)
        yield name, two, function
        yield name, two[1:], lambda a, f=function: f(2.0, a)
    yield from each(operator, "and_ or_ xor", *bits)
    yield from each(operator, "invert", bits[0])
    yield "where", two, lambda a, b: torch.where(a > 0, a, b)
    yield "where", [x(3, 4)], lambda a: torch.where(a > 0)
    yield from drawn(T, "bernoulli_ exponential_ normal_ uniform_", x(3, 4))
    yield from drawn(F, "rrelu_ dropout alpha_dropout", x(3, 4))
    yield from each(
        T,
        "bool byte char clone contiguous cpu detach double float half int long short zero_ "
        "requires_grad_ resolve_conj",
        x(3, 4).abs(),
    )
    yield "bfloat16", [x(3, 4)], lambda a: a.bfloat16().float()
    yield "data", [x(3, 4)], lambda a: a.data
    yield from each(torch, "zeros_like ones_like", x(3, 4))
    yield from each(torch, "full_like", x(3, 4), 2.0)
    yield from drawn(torch, "empty_like rand_like randn_like", x(3, 4))
    yield from drawn(torch, "randint_like", x(3, 4), 3)
    yield from each(T, "to type_as", x(3, 4), x(3).float())
    yield from each(T, "type", x(3, 4), torch.float32)
    yield from each(torch, "isin bucketize", whole_numbers(3, 3, 4), torch.arange(3))
    yield from each(T, "copy_", x(3, 4), x(3, 4))
    yield from each(T, "copy_", x(3, 3), x(3))


def said_by_torch():
    """All that torch itself says are elementwise, of one or two tensors."""
    for name in dir(torch) + ["special_" + name for name in dir(torch.special)]:
        module = torch.special if name.startswith("special_") else torch
        function = getattr(module, name.replace("special_", ""), None)
        if name.endswith("_") or not rules.is_pointwise(name) or name == "equal":
            continue
        for inputs in [x(3, 4).abs()], [x(3, 4).abs(), x(3, 4, seed=1).abs()]:
            try:
                function(*inputs)
            except (TypeError, RuntimeError):  # of whole numbers, say
                continue
            yield name, inputs, function
            break


def along_dimensions():
    F, linalg = torch.nn.functional, torch.linalg
    for dim in (0, 1):
        yield from each(
            torch,
            "sum mean amax amin logsumexp std var prod argmax argmin median max min nansum all any "
            "count_nonzero std_mean var_mean",
            x(3, 4), dim=dim
        )  # fmt: skip
        yield from each(torch, "sum mean amax", x(3, 6), dim=dim, keepdim=True)
        yield from each(torch.Tensor, "norm", x(3, 4), 1, dim)
        yield from each(linalg, "norm vector_norm", x(3, 4), dim=dim)
        yield from each(
            torch, "softmax log_softmax cumsum cumprod cummax cummin sort argsort logcumsumexp",
            x(3, 4), dim=dim
        )  # fmt: skip
        yield from each(torch.special, "softmax log_softmax", x(3, 4), dim=dim)
        yield from each(torch, "norm", x(3, 4), dim=dim)
        yield from each(F, "softmin normalize glu", x(6, 6), dim=dim)
        yield from each(torch.Tensor, "topk roll", x(3, 4), 1, dim)
        yield from each(torch.Tensor, "flip", x(3, 4), dim)
        yield from drawn(F, "gumbel_softmax", x(3, 4), dim=dim)
    yield from each(torch, "sum mean max min any all norm std median", x(3, 4))
    yield from each(torch, "maximum", x(3, 4), x(3, 4))
    yield "max", [x(3, 4), x(3, 4)], torch.max
    yield "sum", [x(3, 4, 6)], lambda a: a.sum((1, 2))
    yield from each(torch, "roll", x(3, 4), 1)
    yield "msort", [x(3, 3)], torch.msort
    yield "vector_norm", [x(3, 4)], torch.linalg.vector_norm
    yield "linear", [x(3, 4), x(3, 4)], F.linear
    yield "linear", [x(3, 3), x(3, 3), x(3)], F.linear
    yield from each(F, "layer_norm rms_norm", x(3, 4), (4,))
    yield from each(F, "layer_norm rms_norm", x(3, 4), (3, 4))
    yield from each(torch, "tril triu", x(3, 3, 3))
    for count in (1, 2, 3):
        images = x(*[3] * 2 + [6] * count)
        for name in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"):
            yield from each(F, "{}{}d".format(name, count), images, 2)


def products():
    F = torch.nn.functional
    for shapes in [(3, 4), (4, 3)], [(3, 3), (3, 3)], [(3, 3, 3), (3, 3, 3)], [(3, 4), (4,)]:
        yield "matmul", [x(*shape) for shape in shapes], torch.matmul
    yield "mm", [x(3, 3), x(3, 3)], lambda a, b: torch.mm(mat2=b, input=a)
    yield "@", [x(3, 3), x(3, 3)], lambda a, b: torch.Tensor.__rmatmul__(a, b)
    yield from each(torch, "mm", x(3, 4), x(4, 3))
    yield from each(torch, "mv", x(3, 3), x(3))
    yield from each(torch, "dot", x(3), x(3))
    yield from each(torch, "bmm", x(3, 4, 3), x(3, 3, 4))
    yield from each(torch.linalg, "matmul", x(3, 4), x(4, 3))
    yield from each(torch, "addmm", x(3, 3), x(3, 4), x(4, 3))
    yield from each(torch, "addmm", x(3), x(3, 4), x(4, 3))
    yield from each(torch, "baddbmm", x(3, 4, 4), x(3, 4, 3), x(3, 3, 4))
    for letters in "id,jd->ij", "id,id->i", "id,id->d", "id,jd":
        yield letters, [x(3, 4), x(3, 4)], lambda a, b, e=letters: torch.einsum(e, a, b)
    for batch in (2, 3):
        three = [x(batch, 3, 4), x(batch, 3, 4), x(batch, 3, 4)]
        yield from each(F, "scaled_dot_product_attention", *three)
    yield from each(F, "scaled_dot_product_attention", *[x(3, 2, 4, 4)] * 2 + [x(2, 4, 4)] * 2)


def layers():
    F, nn = torch.nn.functional, torch.nn
    for count in (1, 2, 3):
        images, filters = x(*[3, 3] + [4] * count), x(*[3, 3] + [2] * count)
        for name in ("conv", "conv_transpose"):
            yield from each(F, "{}{}d".format(name, count), images, filters)
        yield from drawn(F, "dropout{}d".format(count), images)
    yield "conv1d", [x(3, 4), x(2, 3, 2)], F.conv1d
    yield "interpolate", [x(3, 4, 4)], lambda a: F.interpolate(a, scale_factor=2.0)
    yield "group_norm", [x(3, 4, 3)], lambda a: F.group_norm(a, 2)
    yield "instance_norm", [x(3, 4, 3)], F.instance_norm
    averages = [torch.zeros(4).double(), torch.ones(4).double()]
    yield "instance_norm", [x(3, 4, 3)], lambda a: F.instance_norm(a, *averages, None, None, False)
    yield from drawn(torch, "feature_dropout feature_alpha_dropout", x(3, 4, 3), 0.5, True)
    yield "embedding", [whole_numbers(3, 3), x(3, 4)], F.embedding
    yield "one_hot", [whole_numbers(3, 3)], lambda a: F.one_hot(a, 3)
    yield "one_hot", [whole_numbers(3, 3)], F.one_hot
    torch.manual_seed(0)
    for module in nn.LSTM(4, 5), nn.GRU(4, 5), nn.RNN(4, 5), nn.RNN(4, 5, 1, "relu"):
        for made in module, nn.LSTM(4, 5, batch_first=True):
            yield "recurrent", [x(3, 3, 4)], lambda a, f=made.double(): f(a)
    rnn = nn.utils.rnn

    def packed(a):
        lengths = torch.full((a.shape[0],), 2)
        sequences = rnn.pack_padded_sequence(a, lengths, True, False)
        return rnn.pad_packed_sequence(sequences, True)

    yield "packed", [x(3, 4, 2)], packed
    for module in nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, batch_first=True):
        yield "attention", [x(3, 3, 4)], lambda a, f=module.double(): f(a, a, a)


def losses():
    F, two = torch.nn.functional, [x(3, 4), x(3, 4, seed=1).abs() + 0.1]
    for reduction in ("none", "sum", "mean"):
        yield from each(
            F,
            "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss hinge_embedding_loss "
            "binary_cross_entropy_with_logits soft_margin_loss kl_div multilabel_soft_margin_loss",
            *two, reduction=reduction
        )  # fmt: skip
        chances = [each.sigmoid() for each in two]
        yield from each(F, "binary_cross_entropy", *chances, reduction=reduction)
        positive = x(3, 4, seed=2).abs() + 0.1
        yield from each(F, "gaussian_nll_loss", *two + [positive], reduction=reduction)
        yield from each(F, "triplet_margin_loss", *two + [x(3, 4) * 2], reduction=reduction)
        for name, inputs in ("margin_ranking", [x(3), x(3) * 2]), ("cosine_embedding", two):
            loss = getattr(F, name + "_loss")
            yield name, inputs + [x(3)], (
                lambda a, b, c, f=loss, r=reduction: f(a, b, c.sign(), reduction=r))  # fmt: skip
        classes = torch.tensor([2, 0, 1])
        yield from each(F, "cross_entropy multi_margin_loss", x(3, 4), classes, reduction=reduction)
        yield from each(F, "cross_entropy", x(3, 3), classes, x(3).abs(), reduction=reduction)
        yield from each(F, "nll_loss", x(3, 4).log_softmax(1), classes, reduction=reduction)
        targets = whole_numbers(4, 3, 4)
        yield from each(F, "multilabel_margin_loss", x(3, 4), targets, reduction=reduction)
        sequences = [x(4, 3, 5).log_softmax(2), whole_numbers(4, 3, 2) + 1]
        yield from each(F, "ctc_loss", *sequences + [torch.full((3,), 4), torch.full((3,), 2)],
                        reduction=reduction)  # fmt: skip


def views():
    F, T = torch.nn.functional, torch.Tensor
    for order in (0, 2, 1), (2, 0, 1), (1, 0, 2):
        yield from each(T, "permute", x(3, 6, 3), order)
    yield from each(torch, "transpose swapaxes swapdims movedim moveaxis", x(3, 6, 3), 0, 1)
    for name in ("t", "adjoint", "T", "mT", "H", "mH"):
        view = getattr(T, name)
        yield name, [x(3, 4)], view if callable(view) else lambda a, f=view: f.__get__(a)
    for shape in (-1, 6), (-1,), (-1, 2, 3):
        yield from each(T, "view", x(3, 6), shape)
        yield from each(T, "reshape", x(3, 4, 6), shape)
    yield "view", [x(3, 6)], lambda a: a.view(torch.int32) * 0
    yield "reshape", [x(3, 4, 6)], lambda a: a.reshape(a.shape[0], -1)
    yield "reshape", [x(3, 4, 6)], lambda a: a.reshape(3, -1)
    for start, end in (1, -1), (0, 1), (0, -1):
        yield from each(T, "flatten", x(3, 3, 6), start, end)
    yield "ravel", [x(3, 4)], torch.ravel
    for dim in (0, 1):
        yield from each(T, "unsqueeze unbind", x(3, 4), dim)
        yield from each(T, "squeeze", x(3, 1), dim)
        yield from each(T, "select", x(3, 4), dim, 0)
        yield from each(T, "narrow", x(3, 4), dim, 0, 1)
        yield from each(T, "chunk split tensor_split repeat_interleave", x(3, 4), 2, dim)
        yield from each(T, "split_with_sizes", x(3, 3), [1, 2], dim)
        for name in ("cat", "concat", "concatenate", "stack"):
            join = getattr(torch, name)
            yield name, [x(3, 3), x(3, 3)], lambda a, b, d=dim, f=join: f([a, b], d)
    yield from each(T, "expand broadcast_to", x(3, 1), (-1, 4))
    yield from each(T, "repeat tile", x(3, 4), (2, 1))
    for name in ("expand", "broadcast_to"):
        yield name, [x(3, 1), x(3)], lambda a, b, f=getattr(T, name): f(b[:1], (a.shape[0], 4))
    for name in ("repeat", "tile"):
        yield name, [x(3, 1), x(1, 4)], lambda a, b, f=getattr(T, name): f(b, (a.shape[0], 1))
    for sizes in (1, 1), (0, 0, 1, 1), (0, 0):
        yield from each(F, "pad", x(3, 4), sizes)
    yield from each(torch, "constant_pad_nd", x(3, 4), (1, 1))


def lookups():
    for index in (
        (slice(None), 0), 0, slice(0, 2), (Ellipsis, 0), (slice(None), None),
        (slice(None), [0, 2]), (slice(None), slice(0, 2)), None, slice(None, None, 2),
    ):  # fmt: skip
        yield "[]", [x(3, 4)], lambda a, i=index: a[i]
    numbers = torch.tensor([2, 0, 1])
    yield "[numbers]", [x(3, 4), numbers], lambda a, i: a[i]
    yield "[:, numbers]", [x(3, 4), numbers], lambda a, i: a[:, i]
    yield "[rows, numbers]", [x(3, 4), numbers], lambda a, i: a[torch.arange(len(a)), i]
    yield "[rows, numbers]", [x(3, 4), numbers], lambda a, i: a[torch.arange(3).flip(0), i]
    yield "[0, :, numbers]", [x(2, 3, 4), numbers], lambda a, i: a[0, :, i]
    for index in (slice(None), 0), 0, slice(None):
        yield "[] =", [x(3, 3), x(3)], lambda a, b, i=index: operator.setitem(a, i, b) or a
        yield "[] =", [x(3, 3)], lambda a, i=index: operator.setitem(a, i, 2.0) or a
    yield "[numbers] =", [x(3, 3), numbers, x(3, 3)], (
        lambda a, i, b: operator.setitem(a, i, b) or a)  # fmt: skip
    yield "[mask]", [x(3, 4)], lambda a: a[a > 0]
    yield "[mask of rows]", [x(3, 4), x(3)], lambda a, b: a[b > 0]
    yield "masked_select", [x(3, 4)], lambda a: a.masked_select(a > 0)
    T, places = torch.Tensor, whole_numbers(3, 3, 3)
    for dim in (0, 1):
        yield from each(T, "gather", x(3, 3), dim, places)
        yield from each(T, "index_select", x(3, 4), dim, numbers)
        yield from each(T, "scatter scatter_add", x(3, 3), dim, places, x(3, 3) + 1)
        yield from each(T, "scatter_reduce", x(3, 3), dim, places, x(3, 3) + 1, "amax")


def new_values():
    for name in ("zeros", "ones", "empty", "rand", "randn"):
        make = getattr(torch, name)
        yield name, [x(3, 4)], lambda a, f=make: f(a.shape[0], 2).nan_to_num() * 0
        yield name, [x(3, 4)], lambda a, f=make: f((2, a.shape[0])).nan_to_num() * 0
    yield "full", [x(3, 4)], lambda a: torch.full((a.shape[0], 2), 1.5)
    yield "normal", [x(3, 4)], lambda a: torch.normal(0.0, 1.0, size=(a.shape[0], 2)) * 0
    yield "randint", [x(3, 4)], lambda a: torch.randint(3, (a.shape[0], 2)) * 0
    for name in ("new_zeros", "new_ones", "new_empty"):
        make = getattr(torch.Tensor, name)
        yield name, [x(3, 4)], lambda a, f=make: f(a, (2, a.shape[0])).nan_to_num() * 0
    yield "new_full", [x(3, 4)], lambda a: a.new_full((a.shape[0],), 2.0)
    for name in ("tensor", "as_tensor", "asarray", "scalar_tensor"):
        yield name, [x(3, 4)], lambda a, f=getattr(torch, name): f(a.shape[0])
    yield "as_tensor", [x(3, 4)], torch.as_tensor
    for name in ("arange", "eye", "randperm"):
        yield name, [x(3, 4)], lambda a, f=getattr(torch, name): f(a.shape[0])


def cases():
    """Return the name of a case, its inputs, and a function of them."""
    for kind in (
        elementwise, said_by_torch, along_dimensions, products, layers, losses, views, lookups,
        new_values,
    ):  # fmt: skip
        yield from kind()


# The proof --------------------------------------------------------------------------------------


class Case:
    """A function, followed as in a model: of the whole inputs, and of the parts of two devices."""

    def __init__(self, inputs, function):
        self.function, self.tried = function, {}
        self.inputs = [value.numpy() if hasattr(value, "numpy") else value for value in inputs]
        self.tensors = [place for place, value in enumerate(inputs) if hasattr(value, "numpy")]
        self.whole = self.computed(self.inputs)
        self.split = functools.lru_cache(None)(self._split)

    def _split(self, place, placement):
        return row_proof.split(self.inputs[place], placement)

    def given(self, values):
        torch.default_generator.manual_seed(0)
        places = enumerate(values)
        return [torch.tensor(v) if place in self.tensors else v for place, v in places]

    def called(self, given):
        with torch.no_grad():
            return list(graph.call_tensors([self.function(*given)]))

    def followed(self, values, placements, count):
        """Return the results, tagged."""
        given = self.given(values)
        for place, placement in zip(self.tensors, placements):
            if isinstance(placement, _rows.Sharded):
                graph.tag(given[place], placement)
            elif isinstance(placement, _rows.Partial):
                graph.tag(given[place], expressions.Total(placement, count, is_regular=True))
        none = ReplicaReductions(CallReductions(), False, [count], torch.device("cpu"), None, True)
        by_rules = mock.patch.object(Propagation, "by_reductions", lambda self, call: None)
        with by_rules, Propagation(torch.nn.Module(), count, row_proof.ROWS, self.tried, none):
            return self.called(given)

    def computed(self, values):
        results = self.called(self.given(values))
        return [each.detach().resolve_conj().resolve_neg().numpy() for each in results]

    def placements(self):
        """All placements of the inputs; of several one alone is a total, or all of one kind."""
        choices = [row_proof.placements_of(self.inputs[place]) for place in self.tensors]
        for given in itertools.product(*choices):
            totals = [each for each in given if isinstance(each, _rows.Partial)]
            if len(totals) < 2 or len(totals) == len(given) and len(set(totals)) == 1:
                yield given

    def parts(self, placements):
        split = [[value] * 2 for value in self.inputs]
        for place, placement in zip(self.tensors, placements):
            split[place] = self.split(place, placement)
        return [list(part) for part in zip(*split)]

    def prove(self, name, found):
        for given in self.placements():
            said = [_tag(each) for each in self.followed(self.inputs, given, row_proof.ROWS)]
            parts = self.parts(given)
            try:
                computed = list(zip(*map(self.computed, parts)))
            except Exception:  # shapes that do not fit each other
                computed = []
            if not all(len(values) == 2 for values in computed) or len(computed) != len(said):
                computed = []
            for place, claim in enumerate(said):
                text = "{}{}: result {}".format(name, list(given), place)
                values = computed[place] if computed else None
                true = _rows.trial.placements(values, self.whole[place]) if values else None
                self.judge(text, place, claim, true, parts, given, found)

    def judge(self, text, place, claim, true, parts, given, found):
        if isinstance(claim, _rows.Mixed):
            found.missing += ["{} is {}".format(text, true[0])] if true else []
        elif isinstance(claim, _rows.Placement):
            if true is None:
                pass  # it fails on a part, which shows
            elif any(row_proof.agree(claim, each) for each in true):
                found.claimed += 1
            else:
                found.wrong.append("{} was said to be {}, and is {}".format(text, claim, true))
        else:
            merged = self.merged(place, parts, given)
            if merged is None:  # the parts cannot be put together, which shows
                found.missing += ["{} is {}".format(text, true[0])] if true else []
            elif _rows.trial.close(merged, self.whole[place]):
                found.claimed += 1
            else:
                found.wrong.append("{} is put together wrongly, and is {}".format(text, true))

    def merged(self, place, parts, given):
        """Return the merged values of parts that were traced; None where that is an error."""
        try:
            followed = [
                self.followed(part, given, count) for part, count in zip(parts, _rows.trial.SIZES)
            ]
            found = [expressions.expression_of(results[place]) for results in followed]
            value = merging.recompute(found, torch.device("cpu"))
        except (merging.NotMergeable, RuntimeError, ValueError):
            return None
        return value.detach().numpy()


def _tag(result):
    found = graph.tag_of(result)
    return _rows.REPLICATED if found is None else found


def test_each_line_says_nothing_but_the_truth(monkeypatch):
    """And each is asked by a case in which it claims something."""
    claiming, found = set(), row_proof.Found()

    def noting(name, line):
        def noted(call, values):
            said = line(call, values)
            for each in said if isinstance(said, list) else [said]:
                if not isinstance(each, (_rows.Mixed, _rows.Unknown)):
                    claiming.add(name)
            return said

        return noted

    for name, line in list(rules.RULES.items()):
        monkeypatch.setitem(rules.RULES, name, noting(name, line))
    for name, inputs, function in cases():
        Case(inputs, function).prove(name, found)
    assert found.wrong == []
    assert set(rules.RULES) - claiming == UNPROVED
    assert found.claimed > 5000
    missing_rules.check("torch", found)
