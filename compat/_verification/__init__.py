"""First steps of a model on several devices, compared with the same steps on one."""

from .comparison import Comparison, largest_difference
from .reasons import Incomparable, normalized, rates
from .report import Record, compared_values, report_at_exit, same, shown, uncompared
from .steps import Attributes, Step, numbered
from .verification import Verification, inputs_perturbed, random_numbers, suspended
