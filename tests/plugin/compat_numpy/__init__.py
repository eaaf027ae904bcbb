"""A sample backend for compat, as another package brings one: numpy, and the models here.

``networks`` is in the place of a framework, and knows nothing of compat. ``replicas`` runs its
models on several devices, ``verified_steps`` compares them with one, ``ranks`` has several
processes train together. Importing this package imports neither numpy nor those.
"""

import sys

from compat.backend import Backend, own_launcher


class Numpy(Backend):
    """numpy, which has no GPU; the devices of ``networks`` are simulated."""

    name = "numpy"
    framework = "numpy"
    distributions = ("numpy",)
    #: What becomes of divisions by zero and the like: "ignore", "warn" or "raise".
    options = ("numpy_errors",)

    def initialised(self):
        return None  # nothing of it is fixed by the import

    def configure(self, settings):
        numpy = self.import_framework()
        settings.devices.settle(0)  # numpy lists no GPU
        self.kept["simulated"] = settings.devices.simulated or 1
        applied, warnings = [], []
        if settings.memory:
            warnings.append("numpy has no limit of memory.")
        if settings.floatx:
            from . import networks

            networks.floatx = settings.floatx
            applied.append("compat_numpy.networks.floatx = {!r}".format(settings.floatx))
        if "numpy_errors" in settings.options:
            numpy.seterr(all=settings.options["numpy_errors"])
            applied.append("numpy.seterr(all={!r})".format(settings.options["numpy_errors"]))
        return applied, warnings

    def devices(self):
        return ["cpu:{}".format(number) for number in range(self.kept.get("simulated", 1))]

    def is_native(self, model):
        networks = sys.modules.get("compat_numpy.networks")  # that of a model is imported
        return networks is not None and isinstance(model, networks.Network)

    def parallelize(self, model, devices):
        from . import replicas

        replicas.remove(model)
        if list(devices) != self.devices()[:1]:
            replicas.install(model, devices)
        return model

    def executed(self, model):
        from . import replicas

        return replicas.executed()

    def watch(self, model, check):
        from . import replicas

        replicas.watch(model, check)

    def profiled(self):
        from . import replicas

        return replicas.profiled()

    def verify(self, model, verification):
        from . import verified_steps

        verified_steps.remove(model)
        if verification is not None:
            verified_steps.install(model, verification)

    def launcher(self, job):
        return own_launcher(job)

    def distribute(self, model, place):
        from . import ranks

        return ranks.distribute(model, place)


backend = Numpy()
