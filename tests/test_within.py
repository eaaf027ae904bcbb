"""Flags of blocks."""

import contextlib
import gc
import sys
import threading

import pytest

from compat._runtime.within import Within


def test_it_is_true_within_and_on_other_threads_and_there_not_here():
    flag, seen = Within(), []
    assert not flag and not flag.here()
    with flag:
        with flag:
            pass
        assert flag and flag.here()
        thread = threading.Thread(target=lambda: seen.append((bool(flag), flag.here())))
        thread.start()
        thread.join()
    assert seen == [(True, False)]
    assert not flag and not flag.here()


def test_threads_are_within_at_once_and_leave_nothing():
    flag, barrier, seen = Within(), threading.Barrier(3), []

    def block():
        with flag:
            barrier.wait()
            seen.append(flag.here())
            barrier.wait()

    threads = [threading.Thread(target=block) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert seen == [True] * 3 and not flag
    assert len(flag.locks) == 1  # that of this thread


def test_it_is_a_context_of_a_stack():
    flag = Within()
    with contextlib.ExitStack() as stack:
        stack.enter_context(flag)
        assert flag.here()
    assert not flag


@pytest.mark.parametrize("point", range(1, 8))
def test_an_interruption_at_any_call_leaves_it_false(point):
    flag, calls = Within(), []

    def count(frame, event, arg):
        calls.append(event)
        if event == "call" and calls.count("call") == point:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def step():
        with flag:
            (lambda: None)()

    sys.setprofile(count)
    try:
        step()
        step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    assert not flag
