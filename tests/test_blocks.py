"""Every block of code in the documentation has a check, and so has every command in its prose.

    python tests/test_blocks.py

prints which. What can run, runs: in the rows of the frameworks, or here. Of what cannot,
because it needs GPUs, a cluster or another library, the syntax is checked, and that compat has all
calls, options and extras that it names.
"""

import argparse
import ast
import configparser
import inspect
import os
import re
import shlex
import subprocess
import sys

import pages
import pytest
import sources
from sources import ROOT

import compat
from compat import __main__, _rows, _verification
from compat._commands import reported_script, script_test
from compat._commands.pytest_plugin import twins
from compat._configuration import pip_extras, registry
from compat._ranks.launch import watching
from compat._runtime import reporting, usage
from compat._runtime.process import process
from compat._verification import comparison


def runs():
    """Yield the blocks of pages that tests run: (the page, the block, the file of the tests)."""
    for folder, _, names in os.walk(os.path.join(ROOT, "tests")):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    source = file.read()
                for function, arguments in _calls_of_pages(source) if "pages." in source else ():
                    document = arguments[0]
                    if function == "fragment":
                        found = [pages.fragment(*arguments)]
                    else:  # run(document, folder, environ, sections)
                        found = pages.taken(*[document] + arguments[1:])
                    for text in found:
                        yield document, text, name


def _calls_of_pages(source):
    """Yield calls of ``pages.run`` and ``pages.fragment``, with the literal arguments."""
    for node in ast.walk(ast.parse(source)):
        function = getattr(node, "func", None)
        if getattr(getattr(function, "value", None), "id", None) == "pages":
            literals = [a for a in node.args if type(a).__name__ in ("Constant", "Str", "List")]
            if literals and function.attr in ("run", "fragment"):
                yield function.attr, list(map(ast.literal_eval, literals))


def documents():
    """All pages with code, from the project's folder."""
    yield from ("README.md", "CONTRIBUTING.md")
    for folder, _, names in os.walk(os.path.join(ROOT, "docs")):
        for name in sorted(names):
            if name.endswith(".md"):
                path = os.path.relpath(os.path.join(folder, name), ROOT)
                yield path.replace(os.sep, "/")


def read(document):
    with open(os.path.join(ROOT, document), encoding="utf-8") as file:
        return file.read()


# Python ---------------------------------------------------------------------------------------


def check_python(text):
    """Check that a text compiles, and that compat takes the arguments of its calls."""
    tree = ast.parse(text)
    compile(text, "block", "exec")
    for node in ast.walk(tree):
        name = _name_in_compat(node)
        if name is not None:
            assert hasattr(compat, name), name
        if isinstance(node, ast.Call) and _name_in_compat(node.func):
            _check_call(getattr(compat, node.func.attr), node)


def _name_in_compat(node):
    """X, where a node is ``compat.X``."""
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "compat":
        return node.attr if node.attr not in ("testing", "backend", "errors") else None
    return None


def _check_call(function, node):
    if any(keyword.arg is None for keyword in node.keywords):  # **options: which, is not said
        node.keywords = [keyword for keyword in node.keywords if keyword.arg]
    names = {keyword.arg: None for keyword in node.keywords}
    inspect.signature(function).bind(*node.args, **names)
    known = set(inspect.signature(function).parameters) | set(registry.options(list(names)))
    assert set(names) <= known, names


# Shell ----------------------------------------------------------------------------------------


def check_shell(text):
    """Check that a text is bash, and that compat's command line takes its options."""
    subprocess.check_output(["bash", "-n", "-c", text], stderr=subprocess.STDOUT)
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", line):
            check_words(shlex.split(part, comments=True))
    check_extras(text)


def check_words(words):
    """If they call compat's command line, that takes them."""
    for place, word in enumerate(words):
        if word == "compat" and not words[place - 1 : place] == ["-m"]:
            is_called = words[place + 1 : place + 2] and words[place + 1] in COMMANDS
            assert is_called or place, words
        if word in ("compat", "keras_gpu_compat") and words[place + 1 : place + 2]:
            if words[place + 1] in COMMANDS:
                check_arguments(words[place + 1 :])


def check_arguments(arguments):
    """Check that compat's command line takes arguments, which otherwise is an error."""
    try:
        _, unknown = __main__._parser(arguments).parse_known_args(arguments)
    except SystemExit as error:
        raise AssertionError("compat does not take {}".format(arguments)) from error
    assert not unknown, (arguments, unknown)


def _subparsers():
    kind = argparse._SubParsersAction
    (action,) = [
        each for each in __main__._parser(__main__.COMMANDS)._actions if isinstance(each, kind)
    ]
    return action.choices


COMMANDS = _subparsers()


def check_mention(words):
    """Check that the options of a command in a sentence, such as ``compat run -n``, exist."""
    options = set(COMMANDS[words[0]]._option_string_actions)
    for word in words[1:]:
        if word.endswith(".py"):
            break  # what follows is the script's
        if word.startswith("-"):
            assert word.partition("=")[0] in options, words


def check_extras(text):
    for names in re.findall(r"(?:(?<=[\"' ])\.|keras-gpu-compat)\[([\w,]+)\]", text):
        assert set(names.split(",")) <= set(pip_extras.PYTHONS) | {"EXTRA"}, names


# What is printed ------------------------------------------------------------------------------


def check_console(text):
    """Each of its commands is bash, and compat's command line takes its options."""
    found = list(pages.commands(text))
    assert found
    for command, _ in found:
        check_shell(command)


def check_printed(text):
    """Check that a text in a page is what compat prints: see ``PRINTED``."""
    (compare,) = [check for start, (check, _) in PRINTED.items() if text.startswith(start)]
    compare(text)


def _is_of_the_example(text):
    """tests/backends/tensorflow2/test_pages.py compares it with the example's output."""
    assert text in read("README.md")


def _is_verdict(text):
    """Check the last lines of ``compat test SCRIPT``."""
    record = _verification.report.Record("net", ["cpu:0", "cpu:1", "cpu:2"])
    record.steps.update(train=3, evaluate=1)
    record.compared, record.largest = 12, (7.8e-06, "weight dense_1/kernel")
    record.operations = dict.fromkeys(record.devices, (2, 3))
    lines = _verification.shown(record.as_dict())
    assert text.splitlines()[2 : 2 + len(lines)] == lines
    source = inspect.getsource(script_test)
    for line in ["The same on several devices.", "all ended well, with the same weights."]:
        assert line in text and line in source


def _is_not_compared(text):
    """Check the verdict on steps that cannot be compared."""
    record = _verification.report.Record("net", ["cpu:0", "cpu:1", "cpu:2"])
    record.steps.update(evaluate=1)
    record.compared, record.largest = 13, (1.5e-07, "output 1")
    record.operations = dict.fromkeys(record.devices, (2, 3))
    for _ in range(3):
        reason = _verification.normalized("layer", "bn", model=None)
        record.note_uncompared("train", reason, 1)
    records = [record.as_dict()]
    assert records[0]["same"] is None
    lines = _verification.shown(records[0]) + [script_test.verdict_on_devices(None, records)]
    assert text.splitlines() == lines


def _is_difference(text):
    """Check an error of verification: its template, and the cause that it names."""
    _, _, said = " ".join(text.split()).partition("ResultsDifferError: ")
    assert comparison.cause_of("output 1", None, 3) in said
    (template,) = [
        text
        for text in sources.texts(inspect.getsource(_verification.verification))
        if text.startswith("The first thing that differs")
    ]
    pattern = "(.+)".join(map(re.escape, re.split(r"{[^}]*}", template)))
    assert re.match(pattern + r"\Z", said), (pattern, said)


def _is_a_difference_of_twins(text):
    """Check the report of the plugin for pytest on twins, with the record of verification."""
    source = inspect.getsource(twins)
    for words in ("trained differently", "differs by ", ", the tolerance is ", " on one device, "):
        assert words in text and words in source, words
    record = _verification.report.Record("sequential_2", ["cpu:0", "cpu:1", "cpu:2"])
    record.steps.update(train=1)
    record.compared, record.largest = 9, (1.4e-05, "weight dense_2/kernel")
    record.operations = dict.fromkeys(record.devices, (2, 3))
    assert text.splitlines()[3:] == _verification.shown(record.as_dict())[1:]


def _is_a_failure(text):
    """Check the report of ``compat run`` on a rank that failed, and on a restart."""
    failed = watching._rank_ended(watching.Ended(1, 137, None), 4)
    again = "compat run: restart {restart + 1} of {max_restarts}, because {failure}."
    assert again in inspect.getsource(watching)
    again = "compat run: restart 1 of 3, because {}.".format(failed)
    lines = ["compat run: {}; the others were ended.".format(failed), again]
    assert text.splitlines() == lines


def _is_a_report_of_devices(text):
    """Check the report of ``compat run --report`` with these numbers."""
    first, header, *rows = text.splitlines()[:-1]
    assert first in inspect.getsource(reported_script)
    names = re.split(r" {2,}", header.strip())
    uses = []
    for row in rows:
        cells = dict(zip(names, re.split(r" {2,}", row.strip())))
        rank = int(cells["rank"]) if "rank" in cells else None
        numbers = [int(cells[name].replace(",", "")) for name in ("rows", "in training", "steps")]
        uses.append(reporting.DeviceUse(cells["device"], rank, *numbers))
    assert text == "{}\n{}\n".format(first, reporting.Report(uses, {}))


def _is_a_drawing(text):
    """Check that the modules in a drawing exist; test_distribution.py checks other names."""
    for module in re.findall(r"^ +(_\w+)\.", text, re.M):
        found = os.path.join(ROOT, "compat", module)
        assert os.path.exists(found) or os.path.exists(found + ".py"), module


def _is_a_warning_of_rows(text):
    """Check the warning of a model that cannot be split from an operation on."""
    fallback = _rows.Fallback(
        _rows.Reason.CROSS_BATCH, "lambda/MatMul (MatMul)", "layer 'lambda'", "train.py, line 12"
    )
    with pytest.warns(compat.CompatWarning) as caught:
        _rows.warn_unsplit(object(), "net", fallback, "cpu:0")
    assert " ".join(text.split()) == str(caught[0].message)


def _is_a_warning_of_a_rank(text):
    """Check the warning of a rank whose hook is not reached."""
    found = "rank 0 of 2 (compat run) exchanged no gradients with the other ranks. "
    found += usage.unreached(["model.make_train_function"])
    with pytest.warns(compat.CompatWarning) as caught:
        usage.report("net", "the first training step", "fit", found)
    del process.unused["net"]
    assert " ".join(text.split()) == str(caught[0].message)


# Blocks without a language to run, by their beginnings: how they are compared, and in which words.
PRINTED = {
    "backend    tensorflow2 (keras": (
        _is_of_the_example,
        "printed by the example in py311-tensorflow",
    ),
    "compat test: train.py": (_is_verdict, "compared with what compat test prints"),
    "model 'net' on cpu:0": (_is_not_compared, "compared with what compat test prints"),
    "model 'sequential_2' trained": (
        _is_a_difference_of_twins,
        "compared with what the plugin for pytest says",
    ),
    "compat run: what each device did": (
        _is_a_report_of_devices,
        "compared with what compat run --report prints",
    ),
    "compat run: rank": (_is_a_failure, "compared with what compat run says"),
    "compat.errors.ResultsDifferError": (_is_difference, "compared with the error's text"),
    "The operation lambda/MatMul": (_is_a_warning_of_rows, "compared with the warning's text"),
    "In the first training step": (_is_a_warning_of_a_rank, "compared with the warning's text"),
    "compat.parallelize(model, gpus=2) ": (_is_a_drawing, "names modules that exist"),
}


def check_ini(text):
    configparser.ConfigParser().read_string(text)


# A block's language, how it is checked, and in which words. Without a language it is shell.
CHECKS = {
    "": (check_shell, "bash; compat's options"),
    "console": (check_console, "bash; compat's options"),
    "diff": (lambda text: None, "applied"),
    "ini": (check_ini, "parsed"),
    "python": (check_python, "compiled; compat's arguments"),
    "text": (check_printed, ""),
}


def checked():
    """Each block, and how it is checked: (document, its first line, the check)."""
    run = {}
    for document, text, name in runs():
        run.setdefault((document, text), set()).add(name)
    for document in documents():
        for language, text in pages.blocks(document):
            check, words = CHECKS[language]
            check(text)
            if language == "text":
                (words,) = [w for start, (_, w) in PRINTED.items() if text.startswith(start)]
            files = run.get((document, text), ())
            assert files or language not in ("console", "diff"), (document, text)
            if files:
                words += "; run by " + ", ".join(sorted(files))
            yield document, text.strip().splitlines()[0], words


def test_every_block_has_a_check():
    found = list(checked())
    assert len(found) > 70
    fences = sum(len(re.findall(r"^ *```", read(document), re.M)) for document in documents())
    assert fences == 2 * len(found)


@pytest.mark.parametrize("document", list(documents()))
def test_commands_in_sentences(document):
    prose = pages.FENCE.sub("", read(document))
    check_extras(prose)
    for words in re.findall(r"`(?:python -m )?compat ([a-z][^`]*)`", prose):
        words = words.split()
        assert words[0] in COMMANDS, words
        check_mention(words)


def test_commands_of_the_command_line(tmp_path, process):
    environ = dict(os.environ, PATH=os.defpath)
    assert pages.run("docs/command-line.md", tmp_path, environ) == 4


# That the checks find something ---------------------------------------------------------------


@pytest.mark.parametrize(
    "language, text",
    [
        ("", "compat run --gpu 0 --nothing train.py\n"),
        ("", "pip install x && python -m compat run -n four train.py\n"),
        ("", "python -m compat tox --backend\n"),
        ("", "if true\n"),
        ("", "pip install '.[caffe]'\n"),
        ("console", "$ compat pins theano --for 3.7\n"),
        ("ini", "no section\n"),
        ("python", "model = compat.parallelise(model)\n"),
        ("python", "compat.configure_gpu(gpu=2)\n"),
        ("python", "compat.parallelize(model, devices=2)\n"),
        ("python", "compat.parallelize(\n"),
        ("text", "backend    tensorflow2 (keras 1.0)\n"),
        ("text", "compat test: train.py\n\nother\n"),
        ("text", "compat.errors.ResultsDifferError: other\n"),
        ("text", "compat.parallelize(model, gpus=2)  a\n  _no_module.f()\n"),
        ("text", "what nobody compares\n"),
    ],
)
def test_what_is_wrong_is_found(language, text, capsys):
    wrong = AssertionError, AttributeError, SyntaxError, TypeError, ValueError, OSError
    with pytest.raises(wrong + (configparser.Error, subprocess.CalledProcessError)):
        CHECKS[language][0](text)


def test_a_mention_of_an_option_that_is_not_there_is_found():
    with pytest.raises(AssertionError):
        check_mention("run --cores 3".split())


if __name__ == "__main__":
    for each in checked():
        print("{:32}  {:60.60}  {}".format(*each))
    sys.exit()
