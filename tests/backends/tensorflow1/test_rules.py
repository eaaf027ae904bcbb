"""TensorFlow 1.15: the table of operations, proved by computing with parts of a batch."""

import tensorflow as tf

from compat.testing import keras_under_test, slow

# As tests import it anyway; elsewhere the table is the same.
if hasattr(tf, "raw_ops") and keras_under_test().__name__ == "keras":
    from .. import tensorflow_row_cases

    @slow  # tensorflow2/test_rules.py has almost all of the same operations
    def test_no_line_of_the_table_claims_what_is_not_true():
        tensorflow_row_cases.check()
