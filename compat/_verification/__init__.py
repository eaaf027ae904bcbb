"""First steps of a model on several devices, compared with the same steps on one."""

from .comparison import Comparison, largest_difference
from .report import Record, is_good, report_at_exit, shown
from .steps import NORMALISED, Attributes, Step, numbered
from .verification import Verification, inputs_perturbed, random_numbers, suspended
