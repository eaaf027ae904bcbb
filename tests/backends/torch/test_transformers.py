"""torch: models of Hugging Face's transformers, and its Trainer, on three devices as on one."""

import copy
import inspect
import warnings

import pytest
import torch
import transformers

import compat
from compat.testing import DEVICES

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas
from .test_verification import verified_module

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
WORDS = 50
LENGTH = 6


def tagger():
    return transformers.BertForTokenClassification(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0,
            embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=16, max_position_embeddings=32,
        )
    )  # fmt: skip


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
            dropout_rate=0, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def both(make):
    """Return the model on one device, and on three."""
    torch.manual_seed(0)
    plain = make()
    return plain, compat.parallelize(copy.deepcopy(plain))


def batch(count, step, labels=2):
    """Sentences; from the second batch on some are padded, and their labels ignored."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < (lengths if step else LENGTH)).long().expand(count, -1)
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": (words % labels).masked_fill(mask == 0, -100),
    }


@pytest.mark.parametrize(
    "make, verify, first", [(tagger, 0, 1), (gpt2, 1, 0), (llama, 0, 1), (t5, 1, 0)]
)
def test_losses_of_padded_sentences(make, verify, first):
    """Uneven batches, and fewer rows than devices; caches are returned by default.

    Ignored labels come in the first batch, or from the second one on.
    """
    more = {"output_hidden_states": True} if make is llama else {}
    plain, parallel = both(make)
    if verify:
        verified_module(parallel, verify)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (plain, parallel)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        for step, count in enumerate((10, 7, 3, 2), first):
            losses = []
            for module, optimizer in zip((plain, parallel), optimizers):
                result = module(**batch(count, step), **more)
                optimizer.zero_grad()
                result.loss.backward()
                optimizer.step()
                losses.append(result.loss)
            torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    for (name, one), other in zip(plain.state_dict().items(), parallel.state_dict().values()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)
    assert replicas(lambda: parallel(**batch(10, 1), **more)) == DEVICES


@pytest.mark.parametrize("make, verify, beams", [(gpt2, 4, 1), (t5, 0, 3)])
def test_generated_words(make, verify, beams):
    """Each step is given the cache of the one before, which beam search puts in another order."""
    plain, parallel = both(make)
    if verify:
        verified_module(parallel, verify)
    given = batch(7, 0)
    del given["labels"]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        for model in (plain, parallel):
            model.eval()
            found.append(model.generate(**given, max_new_tokens=4, num_beams=beams))
    assert torch.equal(*found)
    assert replicas(lambda: parallel.generate(**given, max_new_tokens=1)) == DEVICES


class Sentences(torch.utils.data.Dataset):
    """With a column that the models do not take."""

    def __init__(self):
        self.columns = batch(23, 1)

    def __len__(self):
        return 23

    def __getitem__(self, row):
        return dict({name: column[row] for name, column in self.columns.items()}, note=row)


def test_trainer(tmp_path):
    """It takes the columns that the signature of ``forward`` has, and divides losses itself."""
    plain, parallel = both(gpt2)
    assert inspect.signature(parallel.forward) == inspect.signature(plain.forward)
    record = verified_module(parallel, 2)
    losses = []
    for model in (plain, parallel):
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=5, num_train_epochs=1, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Sentences(), eval_dataset=Sentences()
        )
        trainer.remove_callback(transformers.PrinterCallback)
        losses.append([trainer.train().training_loss, trainer.evaluate()["eval_loss"]])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for (name, one), other in zip(plain.state_dict().items(), parallel.state_dict().values()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)
    assert record.steps["train"] == 2
    assert replicas(lambda: parallel(**batch(10, 1))) == DEVICES
