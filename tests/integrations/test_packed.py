"""Rows that hold several documents, and masks that do not say where padding is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from seqreg import BadInput, Criterion
from seqreg.ascent import Ascent
from seqreg.integrations.hf import context
from seqreg.terms.freelb import FreeLB
from seqreg.terms.neftune import NEFTune
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from seqreg.terms.vat import VAT
from tests.helpers import tiny_models

LENGTHS = (7, 3, 5)


def by_document(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """Causal attention that asks what flash attention asks: lengths, or a batch of one row whose positions restart."""
    rows, _, length, _ = query.shape
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    if (ends := given.get("cu_seq_lens_q")) is not None:
        document = torch.bucketize(torch.arange(length), ends[1:], right=True)
        allowed = allowed & (document.unsqueeze(0) == document.unsqueeze(1))
    elif _is_packed_sequence(given.get("position_ids"), rows):
        document = (given["position_ids"][0] == 0).cumsum(0)
        allowed = allowed & (document.unsqueeze(0) == document.unsqueeze(1))
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("by_document", by_document)


def made(attention: str) -> Any:
    net = tiny_models.dropout_off(tiny_models.make("llama"))
    net.set_attn_implementation(attention)
    return net


def documents() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(4, tiny_models.VOCAB, (length,), generator=draw) for length in LENGTHS]


def packed(how: str = "positions") -> dict[str, Any]:
    """One row of all documents; the first token of each is nothing that the one before predicts."""
    ids = torch.cat(documents()).unsqueeze(0)
    labels, starts = ids.clone(), torch.tensor([0, *LENGTHS]).cumsum(0)
    labels[0, starts[:-1]] = -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    batch["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    if how == "lengths":
        ends = starts.to(torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    return batch


def apart() -> dict[str, Tensor]:
    """The same documents, a row each."""
    ids = torch.nn.utils.rnn.pad_sequence(documents(), batch_first=True, padding_value=tiny_models.PAD)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


@pytest.mark.filterwarnings("ignore:rdrop. two passes agree exactly")
@pytest.mark.parametrize("term", [None, R3F(scale=0.1), R3F(scale=0.1, dropout="shared"), RDrop(), SMART()])
@pytest.mark.parametrize(
    ("attention", "how"),
    [("eager", "positions"), ("sdpa", "positions"), ("by_document", "positions"), ("by_document", "lengths")],
)
def test_packed_documents_give_what_they_give_apart(
    attention: str, how: str, term: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, parts and gradient; in float64, but for the softmax of attention, whose rounding an ascent magnifies."""
    for place in ("seqreg.terms.r3f", "seqreg.ascent"):  # noise that depends on the embedding alone
        monkeypatch.setattr(f"{place}.sample", lambda noise, like, scale, mask: scale * torch.sin(1000 * like.detach()))
    criterion = Criterion() if term is None else Criterion(term)
    reports, gradients = [], []
    for net, batch in ((made("eager").double(), apart()), (made(attention).double(), packed(how))):
        reports.append(criterion(context(net, batch, step=0)))
        reports[-1].total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    for name, part in reports[0].parts.items():
        assert reports[1].parts[name].item() == pytest.approx(part.item(), rel=1e-4, abs=1e-7), name
    assert (gradients[0] - gradients[1]).norm() <= 1e-4 * gradients[0].norm()


@pytest.mark.parametrize("how", ["positions", "lengths"])
def test_neftune_takes_the_length_of_each_document(how: str) -> None:
    net, seen = made("eager"), []
    handle = net.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    alpha = 5.0
    for _ in range(30):
        Criterion(NEFTune(alpha=alpha, max_ratio=None))(context(net, packed(how), step=0))
    handle.remove()
    noise = torch.stack(seen) - net.model.embed_tokens(packed()["input_ids"])
    for length, part in zip(LENGTHS, noise.split(LENGTHS, dim=2), strict=True):
        bound = alpha / (length * net.config.hidden_size) ** 0.5
        assert 0.97 * bound < part.abs().max().item() <= bound * 1.001


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (Criterion(VAT()), r"^vat: attack.over='sentence': rows are packed.*use over='token'"),
        (Criterion(FreeLB()), r"^freelb: attack.over='sentence': rows are packed"),
        (Criterion(R3F(scale=0.1, per="sequence")), r"^r3f: per='sequence': rows are packed.*use per='token'"),
        (
            Criterion(SMART(attack=Ascent(spread="sentence"))),
            r"^smart: attack.spread='sentence': rows are packed.*use spread='entry'",
        ),
        (Criterion(per="sequence"), r"^the criterion: per='sequence': rows are packed"),
    ],
)
def test_averages_by_row_are_refused_on_packed_rows(criterion: Criterion, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        criterion(context(made("eager"), packed()))
    criterion(context(made("eager"), apart()))


def test_a_mask_that_does_not_tell_padding_is_refused_where_it_matters() -> None:
    net, batch = made("eager"), apart()
    mask = batch["attention_mask"].bool()
    causal = torch.ones(7, 7, dtype=torch.bool).tril() & mask.unsqueeze(1)
    full = {**batch, "attention_mask": torch.zeros(3, 1, 7, 7).masked_fill(~causal.unsqueeze(1), -1e9)}
    plain = Criterion()(context(net, batch)).total.item()
    assert Criterion()(context(net, full)).total.item() == pytest.approx(plain, rel=1e-5)
    assert Criterion(RDrop(task="none"))(context(net, full, step=1)).parts["base"].item() == pytest.approx(
        plain, rel=1e-5
    )
    for term in (R3F(scale=0.1, relative=True), SMART(), NEFTune()):
        with pytest.raises(BadInput, match=r"^attention_mask is of shape \[3, 1, 7, 7\], which does not tell padding"):
            Criterion(term)(context(net, full, step=0))


def test_rows_are_packed_in_larger_batches_too_and_padded_ones_are_not() -> None:
    net = made("eager")
    ids = torch.arange(3, 15).view(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
    ctx = context(net, batch, step=0)
    assert ctx.forward.packed
    (site,) = ctx.forward.sites.values()
    assert site.lengths is not None
    assert site.lengths.tolist() == [[3] * 6, [4] * 4 + [2] * 2]
    with pytest.raises(BadInput, match="rows are packed"):
        Criterion(per="sequence")(ctx)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = {"input_ids": ids[:1], "labels": ids[:1].masked_fill(mask == 0, -100), "attention_mask": mask}
    padded["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert not context(net, padded, step=0).forward.packed
