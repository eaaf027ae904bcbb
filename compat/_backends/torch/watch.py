"""Watching how the tensors that a replica computes depend on the rows of its part of the batch."""

import inspect

import torch

from . import functions
from .reductions import EXPRESSIONS, Constant, Mixed, Rows, Step, Total, name_of, tag, tag_of


class Watch(torch.overrides.TorchFunctionMode):
    """Tags the results of torch's functions, where an argument has a tag.

    Arguments:
        rows: how many rows of the batch the replica computes.
        probing: dropout drops nothing, so that parts of a batch can be compared with all of it.
    """

    def __init__(self, rows, probing=False):
        super().__init__()
        self.rows = rows
        self.probing = probing
        self.paused = False
        self.items = {}  # by id: numbers that were taken from tensors, and these
        self.inexact = None  # the function that lets parts of a batch differ from the whole

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = name_of(func)
        if functions.RANDOM.match(name):
            if self.probing and name in functions.DROPOUTS:
                return args[0]
            self.inexact = self.inexact or name
        given = list(functions.tensors_in(args)) + list(functions.tensors_in(kwargs.values()))
        tags = [tag_of(tensor) for tensor in given]
        if all(each is None for each in tags):
            return func(*args, **kwargs)
        in_place = functions.is_in_place(name)
        kept = self.kept(args, in_place), self.kept(kwargs, False)
        kept[1].pop("out", None)  # it is the result
        result = func(*args, **kwargs)
        self.follow(func, name, args, kwargs, kept, given, tags, in_place, result)
        return result

    def kept(self, values, in_place):
        """Arguments as they are before the function runs: tags, constants, numbers."""

        def keep(value):
            if not isinstance(value, torch.Tensor):
                return value
            if tag_of(value) is not None:
                return tag_of(value)
            return Constant(value.clone() if in_place and value is values[0] else value)

        return functions.map_nested(keep, values)

    def follow(self, func, name, args, kwargs, kept, given, tags, in_place, result):
        results = [result] if not isinstance(result, (list, tuple)) else list(result)
        if name == "__setitem__":
            results = [args[0]]
        if name in ("item", "__float__") and isinstance(tag_of(args[0]), EXPRESSIONS):
            self.items[id(result)] = (result, args[0])
        tagged = [each for each in tags if each is not None]
        if not all(isinstance(each, EXPRESSIONS) for each in tagged):
            if in_place and isinstance(tag_of(args[0]), EXPRESSIONS):
                tagged = [Mixed(name)]
            # State from before is a constant among rows.
            tags = [None if getattr(each, "constant", False) else each for each in tags]
            tagged = [each for each in tagged if not getattr(each, "constant", False)]
        for index, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                continue
            if name in ("batch_norm", "instance_norm"):
                found = self.normalised(func, args, kwargs, given, tags)
            elif any(isinstance(each, Mixed) for each in tagged):
                found = next(each for each in tagged if isinstance(each, Mixed))
            elif all(isinstance(each, EXPRESSIONS) for each in tagged):
                pick = index if isinstance(result, (list, tuple)) else None
                found = Step(func, kept[0], kept[1], in_place, pick, value.dtype)
            elif any(isinstance(each, EXPRESSIONS) for each in tagged):
                found = Mixed(name)
            else:
                sources = [(t, each) for t, each in zip(given, tags) if each is not None]
                found = self.of_rows(func, name, args, kwargs, sources, value, index)
            tag(value, found)
            if in_place and value._base is not None:
                self.follow_base(value._base, found, name)

    def follow_base(self, base, found, name):
        """A view was changed, and with it what it is a view of."""
        if isinstance(found, Rows):
            before = tag_of(base)
            found = Mixed(name) if isinstance(before, EXPRESSIONS) else before
            if found is None:
                dim = functions.only_dim(base, self.rows)
                found = Mixed(name) if dim is None else Rows(dim)
        elif isinstance(found, EXPRESSIONS):
            found = Mixed(name)
        tag(base, found)

    def normalised(self, func, args, kwargs, given, tags):
        """Batch normalization: each device's own rows, and running averages of them."""
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        bound = bound.arguments
        if bound.get("training"):
            self.inexact = self.inexact or "batch_norm"
        if bound.get("training") or bound.get("use_input_stats"):
            weight = bound["input"].shape[0]
            for name in ("running_mean", "running_var"):
                if bound.get(name) is not None:
                    tag(bound[name], Total("mean", bound[name], weight, regular=True))
        rows = tag_of(bound["input"])
        return rows if rows is not None else next(each for each in tags if each is not None)

    # Functions of rows ------------------------------------------------------------------------

    def of_rows(self, func, name, args, kwargs, sources, value, index):
        """The tag of a result whose arguments have values for each row, or constants."""
        tensor, rows = sources[0]
        if functions.takes_reduction(func):
            found = self.of_loss(func, name, args, kwargs, sources, value)
            if found is not None:
                return found
        if name == "multi_head_attention_forward":
            return Rows(0 if index else 1)
        two = len(args) > 1 and isinstance(args[1], torch.Tensor)  # max() of two tensors
        if name in functions.REDUCTIONS and tensor is args[0] and not two and "other" not in kwargs:
            return self.of_reduction(name, args, kwargs, tensor, rows, value, index)
        if (
            name in functions.ALONG
            and tensor is args[0]
            and rows.dim in functions.dims_given(args, kwargs, tensor, -1)
        ):
            return Mixed(name)
        if name in functions.WEIGHTED and functions.rows_dim(args[1]) is not None:
            return Mixed(name)
        if name in functions.RECURRENT and index:
            return Rows(1)  # states, wherever the batch is
        if name in ("matmul", "mm", "bmm", "dot", "__matmul__", "__rmatmul__", "mv"):
            found = self.of_product(name, args, value)
            if found is not None:
                return found
        if name == "__setitem__" and tag_of(args[0]) is None:
            dim = functions.only_dim(value, self.rows)
            return Mixed(name) if dim is None else Rows(dim)
        if name == "__getitem__" and functions.has_mask(args[1]):
            return Rows(0, regular=False)
        if name == "__getitem__" and tensor is not args[0]:
            return self.by_size(name, sources, value)
        if name == "__getitem__" and self.takes_rows(rows.dim, args[1]):
            return Mixed(name)
        if name == "masked_select":
            return Rows(0, regular=False)
        if not rows.regular:
            same = value.shape[: rows.dim + 1][-1:] == tensor.shape[rows.dim : rows.dim + 1]
            return rows if same else Mixed(name)
        if name in functions.RESHAPES:
            return self.of_reshape(name, func, args, kwargs, rows, value)
        if name in ("cat", "concat", "concatenate"):
            dim = functions.dims_given(args, kwargs, value, 0)[0]
            if dim == rows.dim:
                if len(sources) < len(args[0] if args else kwargs["tensors"]):
                    return Mixed(name)
                return Rows(dim, sum(each.outer for _, each in sources))
        if name in functions.PERMUTATIONS or name == "__getitem__":
            return self.by_prime(func, name, args, kwargs, index, value)
        if list(value.shape).count(tensor.shape[rows.dim]) > 1:
            found = self.by_primes(func, args, kwargs, index, {each.outer for _, each in sources})
            if found is not None:
                return found
        return self.by_size(name, sources, value)

    def takes_rows(self, dim, index):
        """Whether rows are chosen by their numbers, other than ``x[range(rows), ...]``."""
        parts = index if isinstance(index, tuple) else (index,)
        part = parts[dim] if dim < len(parts) else None
        if not isinstance(part, torch.Tensor) or any(p is None or p is Ellipsis for p in parts):
            return False
        return functions.rows_dim(part) is not None or not torch.equal(
            part.cpu(), torch.arange(self.rows)
        )

    def of_reduction(self, name, args, kwargs, tensor, rows, value, index):
        dims = functions.dims_given(args, kwargs, tensor, None, at=2 if "norm" in name else 1)
        if rows.dim in dims:
            kind = functions.REDUCTIONS[name]
            if kind == "norm" and functions.norm_order(args, kwargs) not in (None, 2, "fro"):
                return Mixed(name)
            if index:  # max(dim) has indices, too
                return Mixed("arg" + name)
            weight = tensor.numel() / float(max(1, value.numel()))
            return Total(kind, value, weight if kind == "mean" else None, rows.regular)
        if value.dim() == tensor.dim():
            return rows
        return Rows(rows.dim - sum(dim < rows.dim for dim in dims), rows.outer, rows.regular)

    def of_loss(self, func, name, args, kwargs, sources, value):
        """None where the loss is not reduced."""
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reduction = given.get("reduction")
        if reduction in (None, "none"):
            return None
        if given.get("size_average") is not None or given.get("reduce") is not None:
            return Mixed(name)
        regular = all(rows.regular for _, rows in sources)
        if reduction == "sum":
            return Total("sum", value, regular=regular)
        if reduction == "batchmean":
            return Total("mean", value, given["input"].shape[0], regular)
        if name in functions.CLASS_LOSSES:
            return Total("mean", value, functions.targets_weight(**given))
        return Total("mean", value, sources[0][0].numel(), regular)

    def of_product(self, name, args, value):
        """A product that sums over the rows; None where it does not."""
        left, right = args[:2]
        summed = (
            functions.rows_dim(left) == left.dim() - 1,
            functions.rows_dim(right) == max(0, right.dim() - 2),
        )
        if all(summed):
            return Total("sum", value)
        return Mixed(name) if any(summed) else None

    def of_reshape(self, name, func, args, kwargs, rows, value):
        """Where the rows are among the same elements in other dimensions."""
        shape, count = args[0].shape, self.rows
        before = rows.outer * functions.product_of(shape[: rows.dim])
        result = value.shape
        try:  # one row cannot be told from none
            wide = list(shape)
            wide[rows.dim] = wide[rows.dim] // count * functions.PRIME
            result = func(torch.empty(wide, device="meta"), *args[1:], **kwargs).shape
            count = functions.PRIME
        except RuntimeError:  # a shape without -1
            pass
        passed = 1  # elements of dimensions to the left
        for dim, size in enumerate(result):
            if before % passed == 0 and (passed * size) % (before * count) == 0:
                return Rows(dim, before // passed)
            passed *= size
        return Mixed(name)

    def by_prime(self, func, name, args, kwargs, index, value):
        """Ask the function itself what it makes of another number of rows."""
        source = args[0]
        rows = tag_of(source)
        shape = list(source.shape)
        shape[rows.dim] = functions.PRIME
        try:
            if len(list(functions.tensors_in(args))) > 1:
                return self.by_size(name, [(source, rows)], value)
            stand_in = torch.empty(shape, device="meta")
            result = func(*((stand_in,) + tuple(args[1:])), **kwargs)
        except (RuntimeError, IndexError, NotImplementedError, ValueError):
            return Mixed(name)
        result = result[index] if isinstance(result, (list, tuple)) else result
        if functions.PRIME not in result.shape:  # x[:n], say, which may be all rows of this replica
            return Mixed(name)
        return Rows(list(result.shape).index(functions.PRIME), rows.outer)

    def by_primes(self, func, args, kwargs, index, outers):
        """As ``by_prime``, of all arguments at once; None where that does not tell."""

        def stand_in(value):
            if not isinstance(value, torch.Tensor):
                return value
            shape, rows = list(value.shape), tag_of(value)
            if isinstance(rows, Rows):
                shape[rows.dim] = rows.outer * functions.PRIME
            return torch.empty(shape, dtype=value.dtype, device="meta")

        if len(outers) > 1:
            return None
        outer = outers.pop()
        try:
            result = func(
                *functions.map_nested(stand_in, args), **functions.map_nested(stand_in, kwargs)
            )
        except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
            return None
        result = result[index] if isinstance(result, (list, tuple)) else result
        if not isinstance(result, torch.Tensor):
            return None
        dims = [d for d, size in enumerate(result.shape) if size == outer * functions.PRIME]
        return Rows(dims[0], outer) if len(dims) == 1 else None

    def by_size(self, name, sources, value):
        """The dimension that has the size of the rows'. What broadcasts, aligns at the end."""
        try:
            shape = torch.broadcast_shapes(*[tensor.shape for tensor, _ in sources])
        except RuntimeError:
            shape = None
        found = None
        for tensor, rows in sources:
            size = tensor.shape[rows.dim]
            front, end = rows.dim, rows.dim - tensor.dim() + value.dim()
            wanted = [end] if shape == value.shape else [front, end]
            wanted = [d for d in wanted if 0 <= d < value.dim() and value.shape[d] == size]
            if not rows.regular:
                return rows
            if not wanted:
                only = functions.only_dim(value, size)
                wanted = [] if only is None else [only]
            if not wanted or found is not None and found.dim != wanted[0]:
                return Mixed(name)
            found = Rows(wanted[0], rows.outer)
        return found
