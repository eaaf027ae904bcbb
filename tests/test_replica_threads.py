"""Threads of replicas take turns, and end together."""

import _thread
import contextlib
import threading

import pytest

from compat._rows.replica_threads import (
    DifferentReductions,
    TurnTakingThreads,
    current_turn,
)


def run(*functions):
    return TurnTakingThreads(functions, contextlib.ExitStack).run()


def total(key, value):
    return current_turn().meet(key, value, sum)


def turns():
    return [thread for thread in threading.enumerate() if thread.name.startswith("compat replica")]


def test_replicas_meet_in_turn_and_leave_no_thread():
    order = []

    def replica(number):
        def function():
            for key in range(3):
                order.append((key, number))
                assert total(key, number) == 6
            return number

        return function

    for _ in range(1000):
        order.clear()
        assert run(*map(replica, (1, 2, 3))) == [1, 2, 3]
        assert order == [(key, number) for key in range(3) for number in (1, 2, 3)]
    assert turns() == []
    assert current_turn() is None


def test_what_a_replica_has_set_up_is_taken_out_while_others_run():
    state = []

    def replica():
        mine = [current_turn().index]
        state.extend(mine)

        def suspend():
            state.clear()
            return lambda: state.extend(mine)

        current_turn().suspensions.append(suspend)
        total("first", 0)
        assert state == mine
        total("second", 0)
        assert state == mine
        state.clear()

    run(replica, replica, replica)
    assert state == []


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_replica_ends_all(where, failing):
    ended = []

    def replica():
        index = current_turn().index
        try:
            if where == "after":
                total("first", 1)
            if index == failing:
                raise ArithmeticError(index)
            total("second", 1)
            raise AssertionError("the others do not go on")
        finally:
            ended.append(index)

    with pytest.raises(ArithmeticError):
        run(replica, replica, replica)
    assert sorted(ended) == (list(range(failing + 1)) if where == "before" else [0, 1, 2])
    assert turns() == []


def test_ctrl_c_ends_all():
    def replica():
        total("first", 1)
        if current_turn().index == 1:
            _thread.interrupt_main()
        total("second", 1)

    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):  # it may come after the last one
            run(replica, replica, replica)
    assert turns() == []


@pytest.mark.parametrize("keys", [("a", "a", "b"), ("a", "a", None)])
def test_replicas_that_need_different_values_end(keys):
    def replica():
        key = keys[current_turn().index]
        if key is not None:
            total(key, 1)

    with pytest.raises(DifferentReductions):
        run(replica, replica, replica)
    assert turns() == []
