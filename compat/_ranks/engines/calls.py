"""The call of the script that each rank is in, recorded in the store of the rendezvous.

Ranks in different calls (``fit()`` on one, ``evaluate()`` on another) would exchange different
things: gloo then aborts the process, TensorFlow waits until its timeout. So each rank compares
every call that begins with the next rank's. Steps are not compared, which would cost time; a rank
that waits in one looks once a second whether the next rank has come to a call instead.
"""

import contextlib
from typing import Any

from ... import errors
from .. import waiting

# How often a rank that waits in a step looks where the next rank is, in seconds.
_LOOK = 1.0
# How long a store may take at the end, since it never answers where its process is stopped.
_PATIENCE = 4.0


def different_calls(ranks):
    """Return the error of ranks in different calls.

    Arguments:
        ranks: pairs of a rank and a phrase for its wait.
    """
    waits = "; ".join("rank {} {}".format(*pair) for pair in sorted(ranks))
    return errors.RankError(
        f"The ranks wait for different things: {waits}. Each has to make the same calls in the "
        "same order: fit() and evaluate(), for example, on all of them."
    )


class Calls:
    """The calls of one rank.

    Arguments:
        engine: that of the rank.
        post: a function that puts a text into the store, under a new name.
        read: a function of a name and of seconds that returns the text as soon as it is there, or
            raises an exception after these seconds.
        delete: a function that removes a name.
    """

    def __init__(self, engine: Any, post, read, delete):
        self.engine, self.post, self.read, self.delete = engine, post, read, delete
        self.next = (engine.place.rank + 1) % engine.place.size
        self.count = 0  # calls that have begun
        self.seen: Any = None  # the wait at which the next rank was seen in another call
        engine.look_while_waiting(self.look, _LOOK)

    def begin(self, call):
        """Compare a call that begins with the next rank's, for which this one waits."""
        engine, purpose = self.engine, "for the others to call {}".format(call)
        self.count += 1
        with engine.waiting(purpose):
            mine = self.record(self.count, purpose)
            theirs = self.read(self.name(self.count, self.next), engine.timeout)
            if self.count > 2:  # an entry that all have read
                self.delete(self.name(self.count - 2, engine.place.rank))
        engine.exchanges, theirs = 0, theirs.partition(" ")[2]
        if not theirs:
            raise errors.rank_lost(engine.place, purpose, [self.next], "its script has ended")
        if theirs.split(" (")[0] != purpose:
            engine.absent()  # the engine has failed
            raise different_calls([(engine.place.rank, mine), (self.next, theirs)])

    def end(self):
        """Record that this rank's script has ended."""

        def post():
            with contextlib.suppress(Exception):  # the store may have gone
                self.post(self.name(self.count + 1, self.engine.place.rank), "0 ")

        with contextlib.suppress(RuntimeError):  # Python 3.12.0 starts no thread at the end
            waiting.answer(post, _PATIENCE, None)

    def name(self, count, rank):
        """Return the name of a rank's entry in the store for its call of a number."""
        return "compat/call/{}/{}".format(count, rank)

    def record(self, count, purpose):
        """Record the wait in a call in the store, and return it with the script's line."""
        purpose += errors.users_line()
        text = "{} {}".format(self.engine.exchanges, purpose)
        self.post(self.name(count, self.engine.place.rank), text)
        return purpose

    def look(self, inside):
        """End this process if it waits in a step, and the next rank is in a call instead."""
        engine, count = self.engine, self.count + 1
        with contextlib.suppress(Exception):  # nothing is there
            exchanges, _, theirs = self.read(self.name(count, self.next), 0.01).partition(" ")
            # Their call's own wait is one of their exchanges. At the first look this rank's may
            # just be ending, so the second one decides.
            if theirs and int(exchanges) <= inside[1] and self.seen is inside:
                mine = self.record(count, inside[0])
                error = different_calls([(engine.place.rank, mine), (self.next, theirs)])
                waiting.end_process(error, engine.absent)
            self.seen = inside if theirs else None
