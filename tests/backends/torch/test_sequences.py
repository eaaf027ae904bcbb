"""torch: sequences, whose rows are in the second dimension by default."""

import pytest
import torch

import compat

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import agree, rows, same, whole

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
TIME, ROWS, SIZE = 7, 13, 4


def recurrent(name, **options):
    torch.manual_seed(0)
    return getattr(torch.nn, name)(SIZE, 6, num_layers=2, **options)


class Around(torch.nn.Module):
    """Declares no dimension of rows itself."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name, count", [("LSTM", TIME), ("GRU", 2), ("RNN", ROWS), ("GRU", 4)])
def test_recurrent_layers(name, batch_first, count):
    shape = (count, TIME) if batch_first else (TIME, count)
    state = rows(4, count, 6)
    for more in [], [(state, state * 2) if name == "LSTM" else state]:
        module = recurrent(name, batch_first=batch_first, bidirectional=True)
        agree(module, rows(*shape, SIZE), *more)
        if batch_first:
            agree(Around(module), rows(*shape, SIZE), *more)


def test_a_branch_that_only_some_rows_of_sequences_take():
    """Of a module with several layouts to try; the first rows, of which the trial is, agree."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = recurrent("GRU", batch_first=True)

        def forward(self, x):
            last = self.gru(x)[0][:, -1]
            return last * 2 if last.max() > self.limit else last * 3

    module, x = Branches().double(), rows(ROWS, TIME, SIZE)
    with torch.no_grad():
        x = x[module.gru(x)[0][:, -1].amax(1).argsort()]
        module.limit = float(module.gru(x)[0][:, -1].amax(1)[-1]) - 1e-6
    agree(module, x)


def test_packed_sequences_run_on_one_device():
    packed = torch.nn.utils.rnn.pack_sequence([rows(3, SIZE), rows(7, SIZE)], False)
    module = recurrent("GRU").double()
    expected = module(packed)
    with pytest.warns(compat.CompatWarning) as warned:
        found = compat.parallelize(module)(packed)
    assert [str(warning.message) for warning in warned] == [
        "The operation PackedSequence of 'GRU' may need the whole batch, but each device sees only "
        "its shard: compat has no rule for it, and cannot try it. The model runs unsplit on cpu:0."
    ]
    same(expected, found, 0)


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_within_a_module(enforce_sorted):
    """As the documentation of ``DataParallel`` has it; by default the longest come first."""

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lstm = torch.nn.LSTM(SIZE, 6, batch_first=True)
            self.classes = torch.nn.Linear(6, 3)

        def forward(self, x, lengths):
            rnn = torch.nn.utils.rnn
            options = {} if enforce_sorted else {"enforce_sorted": False}
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, **options)
            outputs, (state, _) = self.lstm(packed)
            padded = rnn.pad_packed_sequence(outputs, batch_first=True, total_length=x.size(1))
            return self.classes(state[-1]), padded[0]

    lengths = torch.arange(ROWS) % TIME + 1
    lengths = lengths.sort(descending=True).values if enforce_sorted else lengths
    agree(Classifier(), rows(ROWS, TIME, SIZE), lengths)


@pytest.mark.parametrize("batch_first, count", [(False, TIME), (False, ROWS), (True, ROWS)])
def test_attention(batch_first, count):
    torch.manual_seed(0)
    x = rows(*(count, TIME) if batch_first else (TIME, count), SIZE)
    padded = torch.arange(TIME) >= torch.arange(count)[:, None] % TIME + 1
    causal = torch.ones(TIME, TIME).triu(1).bool()
    for masks in {}, {"key_padding_mask": padded, "attn_mask": causal}:
        module = torch.nn.MultiheadAttention(SIZE, 2, batch_first=batch_first)
        agree(module, x, x, x, **masks)


@pytest.mark.parametrize("count", [TIME, 2])
def test_a_language_model_with_time_first(count):
    """Throughout, as pytorch/examples' word_language_model."""

    class LanguageModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder = torch.nn.Embedding(11, SIZE)
            self.rnn = torch.nn.LSTM(SIZE, 6, 2)
            self.decoder = torch.nn.Linear(6, 11)

        def forward(self, input, hidden):
            output, hidden = self.rnn(self.encoder(input), hidden)
            decoded = self.decoder(output).view(-1, 11)
            return torch.nn.functional.log_softmax(decoded, dim=1), hidden

    words = torch.arange(TIME * count).view(TIME, count) % 11
    state = rows(2, count, 6)
    module, _ = agree(LanguageModel(), words, (state, state * 2))
    plain = LanguageModel().double()
    for length in (3, count):  # a last part of another length
        words = torch.arange(length * count).view(length, count) % 11
        same(plain(words, (state, state)), module(words, (state, state)), 1e-12)


@pytest.mark.parametrize("shape", [(TIME, TIME), (2, 9)])
def test_rows_first_around_a_layer_with_time_first(shape):
    class Transposing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = torch.nn.GRU(SIZE, 6)
            self.classes = torch.nn.Linear(6, 3)

        def forward(self, x, state=None):
            output, state = self.rnn(x.transpose(0, 1), state)
            return self.classes(output[-1]), state, output.transpose(0, 1)

    agree(Transposing(), rows(*shape, SIZE))
    agree(Transposing(), rows(*shape, SIZE), rows(1, shape[0], 6))


def test_rows_that_cannot_be_found_run_unsplit():
    class Set(torch.nn.Module):
        """Attention between the rows."""

        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(SIZE, 2)

        def forward(self, x):
            x = x.unsqueeze(1)
            return self.attention(x, x, x)[0].squeeze(1)

    why = (
        "has recurrent or attention layers whose batch is neither the first nor the second "
        "dimension of its arguments, so that compat cannot identify the batch dimension."
    )
    for count in (ROWS, 2):
        agree(Set(), rows(count, SIZE), whole=whole(None, None, why, "Set"))


def test_a_transformer_that_takes_words():
    """Its own forward has the embedding, and (time, rows) as its words.

    As in torch's tutorial, positions are in a buffer and the mask is in an attribute.
    """

    class Translator(torch.nn.Transformer):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(SIZE, 2, 1, 1, 8, dropout=0.0)
            self.words, self.scores = torch.nn.Embedding(11, SIZE), torch.nn.Linear(SIZE, 11)
            self.register_buffer("positions", torch.randn(50, 1, SIZE))
            self.mask = None

        def forward(self, source, target):
            if self.mask is None or len(self.mask) != len(target):
                self.mask = self.generate_square_subsequent_mask(len(target)).double()
            given = self.words(source) + self.positions[: source.size(0)]
            hidden = super().forward(given, self.words(target), tgt_mask=self.mask)
            return self.scores(hidden)

    for count in (TIME, 2):
        source = torch.arange(TIME * count).view(TIME, count) % 11
        agree(Translator(), source, source[:4] * 3 % 11, atol=1e-10)
