"""Launchers within launchers, and variables that an earlier launcher has left.

``compat run`` starts processes that are ranks of one job. Where a launcher has started several of
``compat run``, each would start a job of its own. Variables alone do not prove a launcher: those of
a cluster or of an earlier job, which a shell may still export, are set aside.
"""

import contextlib
from typing import Dict, List, Mapping, Optional, Tuple

from .. import errors
from . import launchers, tf_config, variables
from . import place as places

#: Variables for a place or a rendezvous besides those of ``launchers.LAUNCHERS``.
_OTHERS = """
    SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS
    JAX_PROCESS_ID JAX_NUM_PROCESSES JAX_COORDINATOR_ADDRESS KERAS_DISTRIBUTION_JOB_ADDRESSES
    TF_CONFIG CLUSTER_SPEC SM_HOSTS SM_CURRENT_HOST NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
    PET_NPROC_PER_NODE NPROC_PER_NODE
    PMIX_NAMESPACE COMPAT_RENDEZVOUS
""".split()
# Kubeflow's JAXJob; without the first, others use these names for other purposes.
_JAXJOB = "COORDINATOR_ADDRESS COORDINATOR_PORT PROCESS_ID NUM_PROCESSES".split()


def _is_of_torchrun(name):
    """Return whether torchrun alone sets this variable."""
    return name.startswith("TORCHELASTIC_")


def started_by(environ: "Mapping[str, str]") -> "Optional[places.Place]":
    """Return the place of this process among several that a launcher of processes started, or None.

    Such a launcher sets variables that nobody else does. RANK and WORLD_SIZE are also set by hand,
    and the variables of clusters for all that runs there: these start nothing.
    """
    if places.stays_alone(environ):
        return None
    candidates: List[Optional[places.Place]] = []
    for launcher, names in launchers.LAUNCHERS:
        four = names.split()
        by_hand = launcher == "torchrun" and not any(map(_is_of_torchrun, environ))
        if not by_hand and all(name in environ for name in four):
            with contextlib.suppress(errors.RankError):
                values = [environ[name].strip() for name in four]
                candidates.append(variables.from_values(launcher, four, values))
    with contextlib.suppress(errors.RankError):
        candidates.append(launchers.srun(environ))
    return next((place for place in candidates if place is not None and place.size > 1), None)


def refuse(environ: "Mapping[str, str]", option: str) -> None:
    """Refuse to start ranks from one of several processes.

    Arguments:
        environ: that of this process.
        option: the one that requests ranks: "-n 2".

    Raises:
        RankError: a launcher has started several such processes.
    """
    place = started_by(environ)
    if place is not None:
        raise errors.RankError(
            f"{option} would start ranks here, but this process is itself {place}: each of the "
            f"{place.size} would start a job of its own, whose rank 0 writes the same files. Start "
            f"the script with one launcher: {place.launcher} alone, with python in place of compat "
            f"run, or compat run alone. COMPAT_ALONE=1 starts {place.size} separate jobs."
        )


def set_aside(environ: "Mapping[str, str]") -> "Tuple[Dict[str, str], List[str]]":
    """Return the environment of a process that is to be alone, whatever launchers have set.

    Returns:
        The environment, and the names that it lacks. Where nothing makes the process one of
        several, it lacks none.
    """
    try:
        is_alone = launchers.launched(environ) is None and tf_config.evaluator_in(environ) is None
    except errors.RankError:
        is_alone = False
    names = set() if is_alone else launchers.NAMES.union(_OTHERS)
    if names:
        names.update(_JAXJOB if _JAXJOB[0] in environ else ())
        names.update(filter(_is_of_torchrun, environ))
    left = {name: value for name, value in environ.items() if name not in names}
    return left, sorted(set(environ) - set(left))
