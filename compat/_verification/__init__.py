"""Whether several devices do what one does: first steps of a model, done both ways and compared."""

from .comparison import Comparison, largest_difference
from .report import Record, is_good, report_at_exit, shown
from .steps import NORMALISED, Attributes, Step, numbered
from .verification import Verification, inputs_perturbed, random_numbers, suspended
