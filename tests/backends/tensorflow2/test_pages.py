"""TensorFlow 2: code of the documentation, run; only in the version of which the pages speak.

What cannot run anywhere is checked by tests/test_blocks.py, which also lists what runs here.
"""

import os
import subprocess
import sys

import pages
from sources import ROOT

from compat.testing import slow

MODEL = """
import tensorflow as tf
from tensorflow import keras
import numpy as np

replicas = []

def build_model():
    replicas.append(tf.distribute.get_strategy().num_replicas_in_sync)
    return keras.models.Sequential([keras.layers.Dense(3, input_shape=(4,))])

x, y = np.ones((61, 4), "float32"), np.ones((61, 3), "float32")
model = build_model()
"""
PARTS = """
shared_lstm = keras.layers.LSTM(4)
tweet_a, tweet_b = keras.Input((5, 2)), keras.Input((5, 2))
"""


def run(program, folder, **environ):
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=str(folder),
        env=dict(pages.ENVIRON, PYTHONPATH=ROOT, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@slow
def test_the_readme_and_forms_of_parallelize(tmp_path):
    """The README's first block, where its dots are the model and the data, and what goes on."""
    program = pages.fragment("README.md", "import compat").replace("\n...\n", MODEL)
    program += "print(compat.configure_gpu(gpus=2, memory='grow'))\n"
    program += pages.fragment("docs/parallelize.md", "model = compat.parallelize(model)  ")
    program += "assert replicas == [1, 1, 2], replicas\n" + PARTS
    program += pages.fragment("docs/parallelize.md", "with compat.device(0)")
    program += "print(keras.Model([tweet_a, tweet_b], merged).output_shape)\n"
    printed = run(program, tmp_path, COMPAT_SIMULATE="2")
    assert "devices    /cpu:0, /cpu:1\n" in printed
    assert printed.splitlines()[-1] == "(None, 8)"
    assert (tmp_path / "model.h5").exists()


@slow
def test_the_readme_without_the_call(tmp_path):
    automatic = pages.fragment("README.md", "compat.configure_gpu(gpus=2, parallelize=True)")
    program = "import compat\n" + automatic + MODEL
    program += "model.compile('sgd', 'mse')\nprint(compat.configure_gpu(gpus=2, parallelize=True))"
    report = run(program, tmp_path, COMPAT_SIMULATE="2")
    assert "sequential" in report and "on /cpu:0, /cpu:1" in report, report


@slow  # its section on torch is tested there
def test_quick_start(tmp_path):
    count = pages.run("docs/quickstart.md", tmp_path, pages.ENVIRON, ["The script", "TensorFlow"])
    assert count == 3


@slow
def test_moving_from_mirrored_strategy(tmp_path):
    count = pages.run(
        "docs/migration-from-others.md", tmp_path, pages.ENVIRON, ["MirroredStrategy"]
    )
    assert count == 1


def test_example_prints_what_the_readme_says(tmp_path):
    """To the digit: numpy draws its weights and data."""
    said = subprocess.check_output(
        [sys.executable, os.path.join(ROOT, "examples", "train.py")],
        cwd=str(tmp_path),
        env=dict(pages.ENVIRON, PYTHONPATH=ROOT),
        universal_newlines=True,
    )
    assert said == pages.fragment("README.md", "backend    tensorflow2")
