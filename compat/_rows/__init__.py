"""How a value depends on the rows of a batch: one theory for all backends.

``placements`` has the words, ``arithmetic``, ``views`` and ``lookups`` the rules, by kind of
operation. ``trial`` asks what no rule knows, and ``policy`` says what becomes of what cannot be
split. Nothing here imports a framework.
"""

from . import trial
from .arithmetic import *
from .lookups import *
from .placements import *
from .policy import *
from .values import *
from .views import *
