"""Which metrics of a user's own add up over ranks, by how they set their variables."""

import pytest

from compat._ranks import metrics


class Adds:
    def plainly(self, y):
        self.x.assign(self.x + y.sum())
        self.y.assign(self.y + 1)

    def of_its_type(self, y):
        y = y.astype(self.dtype)
        self.x.assign(self.x + y.astype(y.dtype).sum())

    def in_a_branch(self, y, sample_weight=None):
        if sample_weight is not None:
            y = y * sample_weight
        self.x.assign(self.x + y.sum())


class Sets:
    def another_value(self, y):
        self.x.assign(y)

    def a_product(self, y):
        self.x.assign(self.x * y)

    def another_variable(self, y):
        self.x.assign(self.y + y)

    def by_name(self, y):
        self.x.assign(value=self.x + y)

    def what_depends_on_it(self, y):
        part = self.x * 0.1
        self.x.assign(self.x + y * part)

    def what_depends_on_another(self, y):
        self.x.assign(self.x + self.y * y)

    def what_a_method_gives(self, y):
        self.x.assign(self.x + self.smoothed(y))

    def what_a_function_makes_of_it(self, y):
        self.x.assign(self.x + y.with_respect_to(self))

    def twice(self, y):
        self.x.assign(self.x + y)
        self.x.assign(self.x + y)

    def of_a_metric_of_another_name(this, y):
        this.x.assign(max(this.x, y))

    def what_is_not_its_own(self, y):
        total.assign(total + y)  # noqa: F821

    def one_more_than_it_adds_to(self, y):
        self.x.assign(self.x + y)
        total.assign(y)  # noqa: F821

    def by_another_name(self, y):
        x = self.x
        x.assign(x + y)


def methods(kind):
    return [method for name, method in vars(kind).items() if not name.startswith("__")]


@pytest.mark.parametrize("method", methods(Adds))
def test_what_adds(method):
    assert metrics._only_adds(method)


@pytest.mark.parametrize("method", methods(Sets))
def test_what_may_be_no_sum(method):
    assert not metrics._only_adds(method)


def test_a_method_without_a_source_may_be_no_sum():
    made = {}
    exec("def update_state(self, y): self.x.assign(self.x + y)", made)
    assert not metrics._only_adds(made["update_state"])
