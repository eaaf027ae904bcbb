"""How a value depends on the rows of a batch: one theory for all backends.

``placements`` has the words, ``arithmetic``, ``views`` and ``lookups`` the rules, by kind of
operation. ``trial`` asks what no rule knows, and ``policy`` says what becomes of what cannot be
split. Nothing here imports a framework.
"""

from . import trial
from .arithmetic import *  # noqa: F403
from .lookups import *  # noqa: F403
from .placements import *  # noqa: F403
from .policy import *  # noqa: F403
from .values import *  # noqa: F403
from .views import *  # noqa: F403
