"""Numbers of the released implementations: what their presets must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from seqreg import (
    Consistency,
    Context,
    Criterion,
    Evaluation,
    Forward,
    Pass,
    PassRequest,
    Perturbation,
    PerturbationSite,
)
from seqreg.ascent import Ascent
from seqreg.divergences import DIVERGENCES
from seqreg.losses import IGNORE
from seqreg.terms.alum import ALUM
from seqreg.terms.freelb import FreeLB
from seqreg.terms.neftune import NEFTune
from seqreg.terms.rdrop import RDrop
from seqreg.terms.sift import SiFT
from seqreg.terms.smart import SMART
from tests.helpers.stubs import Played

GOLDEN = np.load(Path(__file__).parent / "golden" / "adversarial.npz")
Head = Literal["cls", "tok", "reg"]


def golden(key: str) -> Tensor:
    return torch.from_numpy(np.asarray(GOLDEN[key]))


def close(ours: Tensor | float, key: str) -> None:
    torch.testing.assert_close(torch.as_tensor(ours).detach().float(), golden(key).float(), rtol=1e-4, atol=5e-5)


class Toy(nn.Module):
    """The network of the golden file; its "embedding" is a parameter."""

    def __init__(self, head: Head, norm: bool = False) -> None:
        super().__init__()
        self.head = head
        for name in ("W1", "b1", "W2", "b2", "W3", "b3", "Wr"):
            self.register_parameter(name, nn.Parameter(golden(f"toy.{name}").clone()))
        self.E = nn.Parameter(golden("sift.word" if norm else "toy.E").clone())
        self.norm = nn.LayerNorm(4, eps=1e-7) if norm else None
        if self.norm is not None:
            self.norm.weight.data, self.norm.bias.data = golden("sift.ln_weight"), golden("sift.ln_bias")

    def forward(self, shifts: Sequence[Perturbation]) -> Tensor:
        embeds: Tensor = self.E
        for shift in shifts:
            delta = shift.delta["encoder"]
            delta = delta(embeds) if callable(delta) else delta
            if shift.point == "normalised":
                embeds = functional.layer_norm(embeds, (4,), eps=1e-7)
            embeds = (embeds.detach() if shift.detach else embeds) + delta
        if self.norm is not None:
            embeds = self.norm(embeds)
        h = torch.tanh(embeds @ self.W1 + self.b1)
        pooled = h.mean(1)
        if self.head == "cls":
            return pooled @ self.W2 + self.b2
        return (h + pooled.unsqueeze(1)) @ self.W3 + self.b3 if self.head == "tok" else pooled @ self.Wr


class ToyForward(Forward):
    def __init__(self, toy: Toy, mask: Tensor | None = None) -> None:
        self.module, self.sites, self.passes, self.shifts = toy, {"encoder": PerturbationSite(mask=mask)}, 0, []

    passes: int
    shifts: list[Sequence[Perturbation]]

    def run(self, request: PassRequest) -> Pass:
        self.passes += 1
        self.shifts.append(request.shifts)
        toy: Any = self.module
        return Pass(toy(request.shifts), {("encoder", at): toy.E for at in ("embedding", "normalised", "layernorm")})

    def final(self) -> Tensor:
        delta = self.shifts[-1][-1].delta["encoder"]
        assert isinstance(delta, Tensor)
        return delta


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Begin every ascent at the stored noise."""

    def put(key: str) -> None:
        monkeypatch.setattr("seqreg.ascent.sample", lambda *_: golden(key).clone())

    return put


@pytest.mark.parametrize("run", ["default", "k3"])
def test_mtdnn_smart(run: str, start: Callable[[str], None]) -> None:
    """mt-dnn at HEAD: raw gradient of a sum, division by the norm, KL both ways with teachers held, over the rows."""
    key = f"smart_mtdnn.{run}"
    start(f"{key}.init_noise")
    extra: dict[str, Any] = {"steps": 3, "step_size": 1.0, "scale": 0.1} if run == "k3" else {}
    toy = Toy("cls")
    forward = ToyForward(toy)
    term = SMART(preset="mtdnn", attack=Ascent(inject="scaled", **extra))
    labels = torch.tensor([2, 0])
    report = Criterion(term)(Context(forward, labels, kind="classes"))
    close(report.values["smart"], f"{key}.loss")
    close(forward.final(), f"{key}.final_noise")
    assert forward.passes - 1 == golden(f"{key}.n_forward").item() == term.cost.forwards
    (report.total - Criterion()(Context(forward, labels, kind="classes")).total).backward()
    for name, parameter in toy.named_parameters():
        close(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, f"{key}.grad.{name}")


def smart_pytorch(toy: Toy, noise: Tensor, step_size: float) -> Tensor:
    """smart-pytorch, written out: the inner KL is `batchmean`, which divides by rows, whatever the outputs are."""

    def logits(delta: Tensor) -> Tensor:
        return toy((Perturbation({"encoder": delta}),))

    def kl(of: Tensor, target: Tensor, reduction: str) -> Tensor:
        return functional.kl_div(of.log_softmax(-1), target.detach().softmax(-1), reduction=reduction)

    state = toy(())
    noise = noise.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kl(logits(noise), state, "batchmean"), noise)
    moved = noise.detach() + step_size * gradient
    final = logits(moved / (moved.abs().amax(-1, keepdim=True) + 1e-6))
    return kl(final, state, "sum") + kl(state, final, "sum")


@pytest.mark.parametrize("head", ["tok", "cls"])
def test_smart_pytorch_divides_the_inner_loss_by_rows(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, reference = Toy(head), Toy(head)
    noise = 0.1 * torch.randn(toy.E.shape)
    monkeypatch.setattr("seqreg.ascent.sample", lambda *_: noise.clone())
    labels = golden("in.TGT") if head == "tok" else torch.tensor([2, 0])
    kind: Literal["tokens", "classes"] = "tokens" if head == "tok" else "classes"
    term = SMART(preset="smart_pytorch", attack=Ascent(inject="scaled", scale=0.1, step_size=1.0))
    report = Criterion(term)(Context(ToyForward(toy), labels, kind=kind))
    slow = smart_pytorch(reference, noise, 1.0)
    torch.testing.assert_close(report.values["smart"], slow.detach(), rtol=1e-5, atol=1e-7)
    plain = Criterion()(Context(ToyForward(toy), labels, kind=kind)).total
    (report.total - plain).backward()
    slow.backward()
    for one, other in zip(toy.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_alum(start: Callable[[str], None]) -> None:
    """Sum of the masked-token loss plus ten times KL both ways over the masked tokens; embeddings get no gradient."""
    start("alum.init_noise")
    toy = Toy("tok")
    forward = ToyForward(toy)
    target = golden("in.TGT")
    labels = target.masked_fill(golden("in.PAD"), IGNORE)
    term = ALUM(preset="alum_v02", attack=Ascent(inject="scaled", scale=0.1, step_size=1.0), weight=10.0)
    report = Criterion(term)(Context(forward, labels, kind="tokens"))
    size = int((labels != IGNORE).sum())
    close(report.total * size, "alum.loss")
    close(forward.final(), "alum.final_noise")
    assert forward.passes == golden("alum.n_forward")
    (report.total * size).backward()
    for name, parameter in toy.named_parameters():
        close(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, f"alum.grad.{name}")


def test_sift(start: Callable[[str], None]) -> None:
    start("sift.default.delta0")
    toy = Toy("cls", norm=True)
    forward = ToyForward(toy)
    close(toy(()), "sift.default.logits")
    labels = torch.tensor([2, 0])
    report = Criterion(SiFT(preset="deberta"))(Context(forward, labels, kind="classes"))
    close(report.values["sift"], "sift.default.loss")
    close(forward.final(), "sift.default.delta1")
    assert forward.passes == golden("sift.default.n_forward")
    plain = Criterion()(Context(forward, labels, kind="classes")).total
    ((report.total - plain) / 5.0).backward()
    names = {
        "E": "embeddings.word",
        "norm.weight": "embeddings.LayerNorm.weight",
        "norm.bias": "embeddings.LayerNorm.bias",
    }
    for name, parameter in toy.named_parameters():
        key = f"sift.default.grad.{names.get(name, f'toy.{name}')}"
        close(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, key)


def test_freelb(start: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three points, the losses summed over rows and averaged over points; gradients of every weight."""
    toy = Toy("cls")
    fed = golden("freelb.l2.fed")
    monkeypatch.setattr("seqreg.ascent.sample", lambda *_: fed[0] - golden("toy.E"))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    forward = ToyForward(toy, mask)
    labels = torch.tensor([2, 0])
    # The toy network does not mask its padding, and the authors' code does not mask the gradient on it.
    term = FreeLB(preset="freelb", attack=Ascent(step_size=0.1, scale=0.2, radius=0.15, padding=True))
    report = Criterion(term)(Context(forward, labels, kind="classes"))
    close(report.total * 2, "freelb.l2.total_loss")
    for point, shifts in enumerate(forward.shifts[1:]):
        torch.testing.assert_close(toy.E.detach() + shifts[-1].delta["encoder"], fed[point], rtol=1e-4, atol=5e-5)
    assert forward.passes - 1 == golden("freelb.l2.n_forward")
    (report.total * 2).backward()
    for name, parameter in toy.named_parameters():
        close(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, f"freelb.l2.grad.{name}")


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_rdrop_fairseq(alpha: float) -> None:
    first, second = golden("in.PS").clone().requires_grad_(), golden("in.QS").clone().requires_grad_()
    labels = golden("in.TGT").masked_fill(golden("in.PAD"), IGNORE)
    term = RDrop(preset="fairseq_rdrop") if alpha else RDrop(alpha=1e-30)
    report = Criterion(term, label_smoothing=0.1)(Context(Played(first, second), labels, kind="tokens"))
    size = int((labels != IGNORE).sum())
    close(report.total * size, f"rdrop.fairseq_bart_loss_alpha{alpha}")
    (report.total * size).backward()
    assert first.grad is not None
    assert second.grad is not None
    close(first.grad, f"rdrop.fairseq_bart_gradP_alpha{alpha}")
    close(second.grad, f"rdrop.fairseq_bart_gradQ_alpha{alpha}")


@pytest.mark.parametrize("preset", ["hf_neftune", "paper"])
def test_neftune(preset: str) -> None:
    """The stored batch has no padding that a mask would tell of, so both forms are transformers' numbers."""
    embeds = functional.embedding(golden("neft.ids"), golden("neft.weight"))
    context = Evaluation(Context(Played(), torch.zeros(2, 3, dtype=torch.long), kind="tokens"))
    shift = NEFTune(preset=preset, alpha=5.0).declare(context).input_shift
    torch.manual_seed(2)
    noise = shift.delta["encoder"]
    assert callable(noise)
    close(embeds + noise(embeds), "neft.hf_out")
    close(embeds, "neft.hf_eval")


CASES: list[tuple[str, Callable[[Tensor, Tensor], Tensor], str]] = [
    ("mtdnn.stable_kl_sum", lambda p, q: DIVERGENCES["stable_kl"](q, p).sum(), "PQ"),
    ("mtdnn.stable_kl", lambda p, q: DIVERGENCES["stable_kl"](q, p).mean(), "PQ"),
    ("mtdnn.KlCriterion", lambda p, q: DIVERGENCES["reverse_kl"](p, q).mean(), "PQ"),
    ("smartpt.kl_loss", lambda p, q: DIVERGENCES["reverse_kl"](p, q).mean(), "PQ"),
    ("alum.KL_sum", lambda p, q: DIVERGENCES["reverse_kl"](p, q).sum(), "PQ"),
    ("mtdnn.SymKlCriterion", lambda p, q: teachers(p, q).mean(), "PQ"),
    ("mtdnn.SymKlCriterion_sum", lambda p, q: teachers(p, q).sum(), "PQ"),
    ("smartpt.sym_kl_loss", lambda p, q: teachers(p, q).sum(), "PQ"),
    ("vatpt.sym_kl_loss", lambda p, q: teachers(p, q).mean(), "PQ"),
    ("mtdnn.SymKlCriterion_seq", lambda p, q: teachers(p, q).sum() / 2, "PSQS"),
    ("sift.symmetric_kl", lambda p, q: DIVERGENCES["symmetric_ce"](p, q), "PQ"),
    ("rdrop.readme_kl", lambda p, q: DIVERGENCES["symmetric_kl"](p, q).sum() / 2, "PQ"),
    ("freelb.sym_kld", lambda p, q: DIVERGENCES["symmetric_kl"](p, q).sum() / 2, "PQ"),
    ("mtdnn.MseCriterion_flat", lambda p, q: DIVERGENCES["mse"](p, q).mean(), "R1R2"),
    ("sift.mse", lambda p, q: DIVERGENCES["mse"](p, q).mean(), "R1R2"),
]


def teachers(p: Tensor, q: Tensor) -> Tensor:
    ctx = Evaluation(Context(Played(), torch.zeros(p.shape[:-1], dtype=torch.long), kind="tokens"))
    return Consistency(Pass(p), Pass(q), detach="teachers").from_logits(ctx)[0]


@pytest.mark.parametrize(("key", "function", "inputs"), CASES, ids=[case[0] for case in CASES])
def test_divergence(key: str, function: Callable[[Tensor, Tensor], Tensor], inputs: str) -> None:
    first, second = {"PQ": ("P", "Q"), "PSQS": ("PS", "QS"), "R1R2": ("R1", "R2")}[inputs]
    a, b = (golden(f"in.{name}").clone().requires_grad_() for name in (first, second))
    value = function(a, b)
    close(value, f"{key}.value")
    value.sum().backward()
    close(torch.zeros_like(a) if a.grad is None else a.grad, f"{key}.grad_a")
    close(torch.zeros_like(b) if b.grad is None else b.grad, f"{key}.grad_b")


def test_moving_average() -> None:
    """beta * average + (1 - beta) * weight, as mt-dnn's unused EMA class."""
    average = golden("ema.w0").clone()
    close(average.lerp_(golden("ema.w1"), 1 - 0.99), "ema.shadow")
