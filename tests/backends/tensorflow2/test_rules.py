"""TensorFlow 2: the table of operations, proved by computing with parts of a batch."""

from compat.testing import span

from .. import tensorflow_row_cases


@span
def test_no_line_of_the_table_claims_what_is_not_true():
    tensorflow_row_cases.check()
