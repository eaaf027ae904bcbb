"""Operations on texts, and on rows of different lengths, for the proof of the table."""

import numpy as np
import tensorflow as tf

raw = tf.raw_ops
# That of TensorFlow 2, in TensorFlow 1.15, too.
strings = getattr(getattr(tf.compat, "v2", None), "strings", None)
TEXTS = np.array([b"the cat sat", b"a dog", b"one by the dog sat"])
GRID = np.array([[b"Ab c", b" x", b"yy"], [b"d", b"E e", b"f9"], [b"3", b"g,h", b"iJ"]])
NUMBERS = np.array([[b"1", b"2.5", b"3"], [b"4", b"-5", b"6"], [b"7", b"8", b"9.25"]])


def all_cases():
    yield from _text_by_text()
    if hasattr(raw, "RaggedTensorToTensor"):
        yield from _words()


def _text_by_text():
    for name, options in [
        ("StringLower", {}),
        ("StringUpper", {}),
        ("StringStrip", {}),
        ("StringLength", {}),
        ("EncodeBase64", {}),
        ("StringToHashBucket", {"num_buckets": 7}),
        ("StringToHashBucketFast", {"num_buckets": 7}),
        ("StringToHashBucketStrong", {"num_buckets": 7, "key": [1, 2]}),
        ("StaticRegexReplace", {"pattern": "[a-e]", "rewrite": "-"}),
        ("StaticRegexFullMatch", {"pattern": "[a-e]"}),
        ("RegexReplace", {"pattern": "[a-e]", "rewrite": "-"}),
        ("RegexFullMatch", {"pattern": "[a-e]"}),
        ("Substr", {"pos": 0, "len": 1}),
        (
            "UnicodeTranscode",
            {"input_encoding": "UTF-8", "output_encoding": "UTF-8"},
        ),
    ]:
        if hasattr(raw, name):
            first = "string_tensor" if name == "StringToHashBucket" else "input"
            operation = getattr(raw, name)
            yield (
                name,
                [GRID],
                lambda x, operation=operation, first=first, options=options: operation(
                    **dict(options, **{first: x})
                ),
            )
    yield "StringToNumber", [NUMBERS], lambda x: tf.strings.to_number(x)
    yield "AsString", [np.float32([[0.5, 1, 2]] * 3).T], lambda x: tf.strings.as_string(x)
    yield "StringJoin", [GRID, GRID.T], lambda *both: raw.StringJoin(inputs=both)
    yield "DecodeBase64", [GRID], lambda x: raw.DecodeBase64(input=raw.EncodeBase64(input=x))
    codes = np.array([[97, 98, 48]] * 3, "int32").T
    yield "UnicodeScript", [codes], lambda x: tf.strings.unicode_script(x)


def _numbers_of(words):
    return strings.to_hash_bucket_fast(words, 5)


def _words():
    def split(x):
        return strings.split(x)

    def numbers(x):
        return split(x).with_values(_numbers_of(split(x).values))

    yield "words padded to a length", [TEXTS], lambda x: numbers(x).to_tensor(shape=[None, 4])
    yield "words padded to the longest row", [TEXTS], lambda x: numbers(x).to_tensor()
    yield "words, flat", [TEXTS], lambda x: _numbers_of(split(x).values)
    yield "words of all rows, numbered", [TEXTS], lambda x: split(x).value_rowids()
    yield "words of all rows, bounds", [TEXTS], lambda x: split(x).row_splits
    if hasattr(strings, "ngrams"):

        def pairs(x):
            found = strings.ngrams(split(x), 2)
            return found.with_values(_numbers_of(found.values))

        yield "pairs of words", [TEXTS], lambda x: pairs(x).to_tensor(shape=[None, 4])
    if hasattr(raw, "RaggedBincount"):
        yield "words counted", [TEXTS], lambda x: _counted(numbers(x))
    if hasattr(strings, "unicode_decode"):

        def characters(x, operation=strings.unicode_decode):
            return operation(x, "UTF-8")

        yield "characters", [TEXTS], lambda x: characters(x).to_tensor(shape=[None, 9])
        yield (
            "characters and where they begin",
            [TEXTS],
            lambda x: characters(x, strings.unicode_decode_with_offsets)[1].to_tensor(
                shape=[None, 9]
            ),
        )
    if hasattr(raw, "DenseBincount"):
        yield (
            "numbers below a limit that they would raise",
            [np.array([[0, 2], [1, 1], [3, 0]], "int32")],
            lambda x: tf.math.bincount(x, minlength=4, maxlength=4, axis=-1),
        )


def _counted(numbers):
    weights = tf.constant([], tf.int64)
    return raw.RaggedBincount(
        splits=numbers.row_splits,
        values=numbers.values,
        size=tf.constant(5, tf.int64),
        weights=weights,
    )
