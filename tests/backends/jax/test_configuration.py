"""Devices of JAX, their memory and threads, before and after JAX makes them."""

import textwrap
import types

import jax
import pytest

import compat
from compat._backends.jax import JAX, backend, configuration
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings


def test_environ(monkeypatch):
    def environ(devices, memory=None, given=None):
        return backend.environ(Settings(devices, memory), given or {})

    assert environ(Devices()) == {"CUDA_VISIBLE_DEVICES": "-1"}
    simulated = {"CUDA_VISIBLE_DEVICES": "-1", "NPROC": "3000"}
    assert environ(Devices(simulated=1000), Memory(fraction=0.5)) == simulated
    assert environ(Devices(simulated=1000), given={"NPROC": "2999"}) == simulated
    assert environ(Devices(simulated=1000), given={"NPROC": "all"}) == simulated
    assert "NPROC" not in environ(Devices(simulated=1000), given={"NPROC": "3000"})
    assert "NPROC" not in environ(Devices(simulated=1))
    monkeypatch.setattr("compat._backends.jax.usable_cores", lambda: 64)
    assert "NPROC" not in environ(Devices(simulated=2))
    assert environ(Devices(simulated=2), given={"NPROC": "0"})["NPROC"] == "6"  # XLA reads 0
    gpus = Devices(["2", "0"], [2, 0])
    order = {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environ(gpus) == order
    assert environ(gpus, Memory(size=2**30)) == order
    grow = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert environ(gpus, Memory(grow=True)) == dict(order, **grow)
    fraction = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25"}
    assert environ(gpus, Memory(fraction=0.25)) == dict(order, **fraction)
    # JAX refuses the two names of the fraction together.
    new = {"XLA_CLIENT_MEM_FRACTION": "0.9"}
    assert environ(gpus, Memory(fraction=0.25), dict(order, **new)) == dict(
        fraction, XLA_CLIENT_MEM_FRACTION=None
    )


@pytest.fixture
def machine_of(monkeypatch, imitate):
    """Have JAX list GPUs that are not here; returns what configures, before JAX made any."""

    def machine_of(platform, number):
        class Device:
            def __init__(self, index):
                self.platform, self.id = platform, index

        assert all(hasattr(jax.devices()[0], name) for name in vars(Device(0)))

        def local_devices(process_index=None, backend=None, host_id=None):
            said = updates.get("jax_rocm_visible_devices") if platform == "gpu" else None
            return [Device(i) for i in range(min(number, len(said.split(","))) if said else number)]

        def update(name, val):
            assert name in jax.config.values
            updates[name] = val

        updates = {}
        imitate(jax, "local_devices", local_devices)
        imitate(jax.config, "update", update)
        # Other tests in this process have simulated devices.
        monkeypatch.setattr(type(jax.config), "jax_platforms", None)
        monkeypatch.setattr(JAX, "initialised", lambda self: None)

        def configured(gpus=None, **settings):
            updates.clear()
            devices = choose(parse_gpus(gpus), None, {}, discover=list)
            JAX().configure(Settings(devices, **settings))
            shortage = devices.shortage and devices.shortage[1]
            return JAX().devices(), dict(updates), devices.gpus, shortage

        return configured

    return machine_of


def test_gpus_of_a_rocm_machine(machine_of):
    configured = machine_of("gpu", 2)
    assert configured() == (["gpu:0", "gpu:1"], {}, ("0", "1"), None)
    ids = {"jax_cuda_visible_devices": "1", "jax_rocm_visible_devices": "1"}
    assert configured([1]) == (["gpu:0"], ids, ("0",), None)
    assert configured(3)[2:] == (("0", "1"), "2 GPUs are visible")
    with pytest.raises(compat.UnsupportedError, match="^jax cannot limit memory to 1024 MiB per "):
        configured(memory=Memory(size=2**30))


def test_a_platform_without_gpus_is_a_warning(machine_of, monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_platforms", "cpu")
    monkeypatch.setattr(JAX, "initialised", lambda self: None)
    settings = Settings(Devices(["0"], [0]))
    _, warnings = JAX().configure(settings)
    assert warnings == [
        "JAX_PLATFORMS=cpu keeps JAX from GPUs. Remove the variable, or ask for no GPU with gpus=0."
    ]


def test_the_gpu_of_a_metal_machine(machine_of):
    configured = machine_of("METAL", 1)
    assert configured() == (["METAL:0"], {}, ("0",), None)
    assert configured(2)[2:] == (("0",), "1 GPU is visible")
    assert configured(0)[1] == {"jax_platforms": "cpu"}


def test_size_of_memory_becomes_one_fraction(machine):
    def fraction(size, *gpus):
        return configuration.fraction(Settings(Devices(gpus, range(len(gpus))), Memory(size=size)))

    machine.add(total=2000)
    machine.add(total=2000)
    machine.add(total=4000)
    machine.plug()
    assert fraction(500 * 2**20, "0", "1") == 0.25
    assert fraction(500 * 2**20, "2") == 0.125
    assert fraction(9000 * 2**20, "2") == 1
    with pytest.raises(compat.UnsupportedError) as error:
        fraction(500 * 2**20, "1", "2")
    assert str(error.value) == (
        "jax cannot limit memory to 500 MiB per GPU: it takes one fraction for all GPUs, and "
        "nvidia-smi does not tell that they all have the same amount. Use a fraction such as "
        'memory=0.5, or memory="grow".'
    )


def test_configured_after_the_import_and_before_the_first_operation(run):
    """Nothing is initialised by it, and simulated devices beat the flag of XLA."""
    printed = run(
        """
        import jax  # not too late
        import compat
        from jax._src import xla_bridge

        report = compat.configure_gpu(simulate=2, floatx="float64", memory="grow")
        print(report.devices, xla_bridge.backends_are_initialized())
        print("\\n".join(report.applied))
        import keras
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        print(layer.kernel.value.dtype, jax.devices())
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=5",
    )
    assert printed.splitlines() == [
        "['cpu:0', 'cpu:1'] False",
        "jax.config.update('jax_platforms', 'cpu')",
        "jax.config.update('jax_enable_x64', True)",
        "jax.config.update('jax_num_cpu_devices', 2)",
        "keras.backend.set_floatx('float64')",
        "float64 [CpuDevice(id=0), CpuDevice(id=1)]",
    ]


def test_devices_are_simulated_by_a_flag_of_xla_before_jax_has_an_option(monkeypatch):
    monkeypatch.setattr(configuration, "jax", types.SimpleNamespace(config=object()))
    flag = "--xla_force_host_platform_device_count"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=5 --xla_other=1")
    assert configuration.simulated() == 5
    assert configuration.simulate(3) == f"XLA_FLAGS=--xla_other=1 {flag}=3"
    assert configuration.simulated() == 3
    monkeypatch.delenv("XLA_FLAGS")
    assert configuration.simulated() == 0


def test_simulated_devices_have_threads_for_steps_that_nobody_waits_for(run):
    """With NPROC removed again, XLA aborted in each of three runs."""
    seconds = "--xla_cpu_collective_call_terminate_timeout_seconds"
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=3)
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
        rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["batch"], []))
        x = jax.device_put(np.full((30, 64), 0.01, "float32"), rows)
        w = jax.device_put(np.ones((64, 64), "float32"), whole)

        @jax.jit
        def step(w, x):
            return w - 0.1 * (x.T @ (x @ w))

        for _ in range(3000):
            w = step(w, x)
        print(abs(x @ w).max() < 0.64)
        """,
        NPROC="",
        XLA_FLAGS=seconds + "=5",
    )
    assert printed.splitlines() == ["True"]


def test_too_late_says_why(run):
    printed = run(
        """
        import jax
        import compat

        jax.numpy.ones(1)
        try:
            compat.configure_gpu(simulate=3)
        except compat.TooLateError as error:
            print(error)
        print(compat.configure_gpu("cpu").devices)  # nothing that has to change
        """
    )
    assert printed.splitlines() == [
        "configure_gpu() came too late for jax: JAX made its devices (cpu:0) with its first "
        "operation (it was imported by `import jax`), and cannot change them or their memory any "
        "more (devices: 3 simulated on the CPU).",
        "Call it before the first model, variable or array is made, best before the first "
        "`import jax` or `import keras`.",
        "['cpu:0']",
    ]


# At exit --------------------------------------------------------------------------------------


def test_no_devices_are_made_anew_at_exit(run):
    """JAX forgets them as it ends, and functions run later that were registered earlier."""
    program = """\
    import atexit
    import compat

    def late():
        backend = compat._api.configured_backend()
        print(backend.memory_peaks(), backend.initialised())

    atexit.register(late)
    compat.configure_gpu(backend="jax", simulate=2)
    import jax
    print(len(jax.devices()))
    """
    assert run(program).splitlines() == ["2", "{} None"]


def test_a_report_at_exit_still_finds_the_devices(run, tmp_path):
    script = """\
    import compat
    compat.configure_gpu(backend="jax", simulate=2)
    import keras
    from compat._backends.jax import JAX

    JAX.memory_peaks = lambda self: print(self.initialised()) or {}
    compat.parallelize(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]))
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    program = """\
    import sys
    from compat._commands import reported_script

    reported_script.main(["yes", "", "", "", "", sys.argv[1]])
    """
    assert "JAX has made its devices" in run(program, str(path)).splitlines()
