"""Prompts and completions of causal language models: ids, labels, cuts, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import context
from seqreg.losses import IGNORE
from seqreg.workbench.data import completions
from seqreg.workbench.data.completions import CompletionCollator, PromptEncoder, features
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.scores.evaluate import completion_nll
from tests.helpers import tiny_models, tiny_tokenizer
from tests.helpers.tiny_models import EOS, PAD, VOCAB

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([TEXT, "TL;DR: summary"], 320)


def test_the_source_is_cut_and_the_rest_of_the_prompt_stays(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, "say: {source}\nTL;DR: ", 5, 8)
    whole = PromptEncoder(tokenizer, "say: {source}\nTL;DR: ", None, 8)
    ids, full = encoder.prompt(TEXT), whole.prompt(TEXT)
    plain = tokenizer(f"say: {TEXT}\nTL;DR:")["input_ids"]
    assert full == plain[:-1]  # with <s> before it, without </s> after it
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.strip().startswith("say: the")
    assert text.endswith("\nTL;DR:")
    begin = next(place for place, (a, b) in enumerate(zip(ids, [*full, -1], strict=False)) if a != b)
    assert ids == full[:begin] + full[begin + len(full) - len(ids) :]  # one gap, at the end of the source
    shown = tokenizer.decode(full[1:begin]).strip().removeprefix("say:").strip()
    assert TEXT.startswith(shown)
    assert len(ids) <= 5 + encoder.overhead


def test_a_completion_begins_with_the_spaces_of_the_prompt_and_ends_with_eos(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, "{source}\nTL;DR: ", 5, 8)
    ids, cut = encoder.completion("the fox")
    assert ids == [*tokenizer(" the fox", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert cut == 0
    long, cut = encoder.completion(TEXT)
    assert len(long) == 8
    assert cut == len(tokenizer(f" {TEXT}", add_special_tokens=False)["input_ids"]) + 1 - 8
    assert tokenizer.eos_token_id not in long  # it does not end there


def test_an_empty_prompt_has_a_token_to_predict_from(tokenizer: Any) -> None:
    assert PromptEncoder(tokenizer, "{source} ", 5, 8).prompt("") == [tokenizer.bos_token_id]


class Padding:
    """All of a tokenizer that a collator needs; it pads with eos, as one without a padding token does."""

    pad_token_id, eos_token_id = EOS, EOS


ROWS = [([5, 6, 7, 8], [9, 10, EOS]), ([11], [12, 13, 14, 15, EOS]), ([16, 17, EOS, 18, 19, 20], [21, EOS])]


def batch(rows: Any) -> dict[str, Tensor]:
    return dict(CompletionCollator(Padding())([features(*row) for row in rows]))


def reference(model: Any, prompt: list[int], completion: list[int]) -> tuple[Tensor, list[int]]:
    """The NLL of every token of a completion, one pass for each, and a greedy completion: no padding, no cache."""
    with torch.no_grad():
        nll = []
        for place, token in enumerate(completion):
            logits = model(torch.tensor([[*prompt, *completion[:place]]])).logits[0, -1]
            nll.append(-logits.log_softmax(-1)[token])
        written: list[int] = []
        while len(written) < 6 and EOS not in written:
            written.append(int(model(torch.tensor([[*prompt, *written]])).logits[0, -1].argmax()))
    return torch.stack(nll), written


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loss_and_completions_are_those_of_a_slow_reference_whatever_the_batch(name: str) -> None:
    model = tiny_models.make(name).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = EOS, EOS
    slow = [reference(model, *row) for row in ROWS]
    tokens = torch.cat([nll for nll, _ in slow])
    ctx = context(model, batch(ROWS))
    report = Criterion()(ctx)
    assert report.total.item() == pytest.approx(tokens.mean().item(), rel=1e-5)
    assert report.clean is not None
    sums, counts = completion_nll(report.clean, ctx)
    torch.testing.assert_close(sums, torch.stack([nll.sum() for nll, _ in slow]), rtol=1e-5, atol=1e-5)
    assert counts.tolist() == [len(completion) for _, completion in ROWS]
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    together = completions.complete(model, batch(ROWS), **options).tolist()
    for row, ids, (_, written) in zip(ROWS, together, slow, strict=True):
        alone = completions.complete(model, batch([row]), **options)[0].tolist()
        assert alone == written
        assert ids == written + [EOS] * (len(ids) - len(written))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_do_not_depend_on_padding_or_on_what_pads(name: str) -> None:
    model = tiny_models.dropout_off(tiny_models.make(name))
    grads = []
    for pad, extra in ((EOS, 0), (PAD, 3)):
        rows = batch(ROWS)
        real = rows["attention_mask"].bool()
        fill = {"input_ids": pad, "attention_mask": 0, "labels": IGNORE}
        wide = {key: torch.nn.functional.pad(value, (0, extra), value=fill[key]) for key, value in rows.items()}
        wide["input_ids"][:, : real.shape[1]][~real] = pad
        Criterion()(context(model, wide)).total.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_do_not_depend_on_padding_at_all(name: str) -> None:
    model, grads = tiny_models.dropout_off(tiny_models.make(name)), []
    rows = [completions.features(*row) for row in ROWS]
    joined = dict(completions.PaddingFreeCollator()(rows))
    assert joined["input_ids"].shape == (1, sum(len(row["input_ids"]) for row in rows))
    for made in (batch(ROWS), joined):
        Criterion()(context(model, made)).total.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


CHAT = [("system", "the cat"), ("user", "a dog ran"), ("assistant", "it sat"), ("user", "the bird")]


def test_a_chat_is_what_the_template_writes() -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    encoder = completions.ChatEncoder(tokenizer, None, 9)
    text = "system : the cat user : a dog ran assistant : it sat </s> user : the bird assistant : "
    assert tokenizer.decode(encoder.prompt(CHAT)) == tokenizer.decode(tokenizer(text)["input_ids"])
    assert encoder.completion(CHAT, "on a mat") == (tokenizer("on a mat </s>")["input_ids"], 0)
    assert completions.ChatEncoder(tokenizer, None, 2).completion(CHAT, "on a mat") == (
        tokenizer("on a")["input_ids"],
        2,
    )
    assert completions.ChatEncoder(tokenizer, 3, 9).prompt(CHAT) == tokenizer("bird assistant :")["input_ids"]
    asked = completions.ChatEncoder(tokenizer, 2, 9).asked("the {source} sat", "cat and dog")
    assert asked == [("user", "the cat and sat")]
    tokenizer.chat_template = tokenizer.chat_template.replace(" </s>", "")
    assert encoder.completion(CHAT, "on a mat") == (tokenizer("on a mat </s>")["input_ids"], 0)
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(BadInput, match="refuses a chat: no system message"):
        encoder.prompt(CHAT)
    tokenizer.chat_template = "{% if add_generation_prompt %}asked{% endif %}"
    with pytest.raises(BadInput, match="in another way"):
        encoder.completion(CHAT, "on a mat")
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="has no chat template"):
        encoder.prompt(CHAT)


def test_generated_texts_take_the_place_of_references() -> None:
    ids = torch.tensor([[9, EOS, 4], [7, 8, 9], [EOS, EOS, EOS]])
    model = tiny_models.make("llama")
    model.generation_config.eos_token_id = [EOS]
    found = completions.completed(batch(ROWS), ids, model, Padding())
    wanted = batch([(ROWS[0][0], [9, EOS]), (ROWS[1][0], [7, 8, 9]), (ROWS[2][0], [EOS])])
    for key, value in wanted.items():
        assert torch.equal(found[key], value)
    assert VOCAB > 21
