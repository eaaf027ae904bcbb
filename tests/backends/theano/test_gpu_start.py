"""GPUs that do not come up when Theano is imported."""

from compat.testing import slow

from . import test_contract
from .test_configuration import plugged

theano_process = test_contract.theano_process


@slow
def test_gpus_that_do_not_come_up_are_a_warning(theano_process, machine):
    """Theano itself logs an error and says that its device is cuda0."""
    shown = theano_process(
        """
        configuration, warned = configured(gpus=[2, 0], memory="2GiB")
        import theano
        config = theano.config
        show(
            config=[config.device, config.contexts, config.gpuarray.preallocate],
            variables=[configuration.environ[name] for name in sorted(configuration.environ)][:2],
            devices=configuration.devices,
            applied=configuration.applied,
            warned=[str(w.message) for w in warned],
            reported=configuration.warnings,
            where=[w.filename for w in warned],
        )
        """,
        flags="",
        PATH=plugged(machine, 3),
    )
    assert shown["config"] == ["cuda0", "dev0->cuda0;dev1->cuda1", 2048]
    assert shown["variables"] == ["PCI_BUS_ID", "2,0"]
    assert shown["devices"] == ["cpu"]
    assert shown["applied"] == [
        "theano.config.device = cuda0",
        "theano.config.contexts = dev0->cuda0;dev1->cuda1",
        "theano.config.gpuarray.preallocate = 2048",
        "cuda0, cuda1 did not come up: the package pygpu is missing, or older than 0.7",
    ]
    assert (
        shown["warned"]
        == shown["reported"]
        == [
            test_contract.MISSING.format("cuda0, cuda1"),
            "GPU 2,0 was asked for, but theano sees cpu. Going on with cpu.",
        ]
    )
    assert set(shown["where"]) <= {"-c", "<string>"}  # the caller's line


def test_a_gpu_that_does_not_come_up_is_an_error_if_strict(theano_process, machine):
    shown = theano_process(
        """
        text = refusal(gpus=1, strict=True)
        show(text=text, flags=os.environ["THEANO_FLAGS"])
        """,
        flags="device=cpu",
        PATH=plugged(machine, 1),
    )
    assert shown["text"] == "DeviceFailedError: " + test_contract.MISSING.format("cuda0")
    assert shown["flags"].startswith("device=cpu,")


def test_the_reason_is_theanos_own():
    """What Theano logs with pygpu installed, here without CUDA (seen with pygpu 0.7.6)."""
    from types import SimpleNamespace

    from compat._backends.theano.gpu_start import reason

    with_pygpu = SimpleNamespace(gpuarray=SimpleNamespace(pygpu=True))
    logged = RuntimeError(b'Could not load "libcuda.so"', 2)
    assert reason(with_pygpu, logged) == (
        'Could not load "libcuda.so", 2',
        "Look at the driver (nvidia-smi) and at CUDA (CUDA_ROOT), or choose the CPU: gpus=0.",
    )
    assert reason(with_pygpu, None) == (
        "theano logged the reason when it was imported",
        "Look at its log, or call configure_gpu() before `import theano`.",
    )
