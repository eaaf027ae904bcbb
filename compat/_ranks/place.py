"""A process's place among the ranks."""

from .. import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, Optional, Tuple


class Place:
    """A process's place among the ranks of its job, and among those on its own machine.

    Arguments:
        rank: its number among all ranks, from 0.
        size: how many ranks there are, 2 or more.
        local_rank: its number among the ranks on its machine, from 0: that of its device.
        local_size: how many ranks its machine has, or at least has where that is not known.
        launcher: the source of the place, for reports: "torchrun".
        on_one_machine: whether all ranks are known to be on one; None: where the sizes say so.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        launcher: str,
        on_one_machine: "Optional[bool]" = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.launcher = launcher
        self.on_one_machine = local_size == size if on_one_machine is None else on_one_machine

    def __str__(self) -> str:
        return "rank {0.rank} of {0.size} ({0.launcher})".format(self)

    def part_of(self, rows: int, first: int = 0) -> "Tuple[int, int]":
        """Return this rank's run of rows, (start, stop). The first ranks may have one row more.

        Replicas split otherwise: here no rank has more rows of a smaller batch.

        Arguments:
            rows: how many all ranks have.
            first: the place of the first of them.
        """
        least, more = divmod(rows, self.size)
        start = first + self.rank * least + min(self.rank, more)
        return start, start + least + (self.rank < more)

    def rows_of_batch(self, batch_size: int) -> int:
        """Return how many rows of a batch of all ranks are this rank's.

        Raises:
            InvalidArgumentError: less than one row per rank.
        """
        if batch_size < self.size:
            raise errors.InvalidArgumentError(
                f"A batch of {batch_size} rows is too small for {self.size} ranks. Use {self.size} "
                "rows or more."
            )
        start, stop = self.part_of(batch_size)
        return stop - start


def stays_alone(environ: "Mapping[str, str]") -> bool:
    """Return whether ``COMPAT_ALONE=1`` is set, which overrides all other variables."""
    return environ.get("COMPAT_ALONE", "").strip() not in ("", "0")
