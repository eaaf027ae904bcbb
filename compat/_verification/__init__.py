"""Whether several devices do what one does: first steps of a model, done both ways and compared.

A step is done three times from the same state: on one device, on one device again, and on all.
The second time its weights are off by a few units in the last place, and random numbers go on
from where the first one left them. What the two differ by shows how far the step amplifies
rounding, and which of its results are random, so cannot be compared. Here is what all backends
have in common; a ``Step`` of each knows how to do it.
"""

from .comparison import Comparison, largest_difference
from .report import Record, is_good, report_at_exit, shown
from .steps import NORMALISED, Step, numbered
from .verification import Verification, suspended
