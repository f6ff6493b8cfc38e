"""fairseq's own numbers: values and gradients of the released R3F criteria."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqreg import Context, Criterion, spectral_norm
from seqreg.divergences import symmetric_kl
from seqreg.losses import IGNORE, label_smoothed_nll
from seqreg.noise import draw
from seqreg.terms.r3f import R3F
from tests.helpers.stubs import Played

GOLDEN = np.load(Path(__file__).parent / "golden" / "r3f_fairseq.npz")


def golden(key: str) -> Tensor:
    return torch.from_numpy(np.asarray(GOLDEN[key]))


def close(ours: Tensor | float, key: str) -> None:
    """To rtol 1e-5; entries a million times smaller than the largest are rounding in the stored float32 itself."""
    expected = golden(key).double()
    found = torch.as_tensor(ours).detach().double().reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.fixture
def labels() -> Tensor:
    target = golden("target")
    return target.masked_fill(target == golden("pad"), IGNORE)


@pytest.mark.parametrize("e", [0.0, 0.1, 0.2])
def test_label_smoothing(e: float, labels: Tensor) -> None:
    loss, nll = label_smoothed_nll(golden("logits"), labels, e, "fairseq")
    close(loss.sum(), f"ls_loss_eps{e}")
    close(nll.sum(), f"ls_nll_eps{e}")


def test_label_smoothing_by_position(labels: Tensor) -> None:
    loss, nll = label_smoothed_nll(golden("logits"), labels, 0.1, "fairseq")
    close(loss, "ls_loss_unreduced")
    close(nll, "ls_nll_unreduced")
    close(label_smoothed_nll(golden("logits"), golden("target"), 0.1, "fairseq")[0].sum(), "ls_loss_noignore")
    close(label_smoothed_nll(golden("logits"), labels, 0.1, "torch")[0].sum(), "ref_ls_torch_ce_eps0.1")


@pytest.mark.parametrize(
    ("suffix", "dtype"), [("", torch.float32), ("_half", torch.float16), ("_bf16", torch.bfloat16)]
)
def test_symmetric_kl(suffix: str, dtype: torch.dtype) -> None:
    values = symmetric_kl(golden("noised_logits").to(dtype), golden("logits").to(dtype))
    close(values.sum() / 3, f"r3f_symm_kl{suffix}")
    if not suffix:
        close(values, "ref_tok_symm_kl")


def test_symmetric_kl_of_nearly_equal_logits() -> None:
    """fairseq's two kl_div calls lose digits here, so the float64 truth is the judge and fairseq's value is near."""
    small, clean = golden("noised_logits_small"), golden("logits")
    ours = symmetric_kl(small, clean).sum() / 3
    exact = symmetric_kl(small.double(), clean.double()).sum() / 3
    assert ours.item() == pytest.approx(exact.item(), rel=1e-4)
    assert golden("r3f_symm_kl_small").item() == pytest.approx(exact.item(), rel=0.05)


@pytest.mark.parametrize("average", ["tok", "savg"])
@pytest.mark.parametrize("weight", [0.01, 1.0])
def test_r3f_criterion(weight: float, average: str, labels: Tensor) -> None:
    key = f"r3f_fwd_lam{weight}_{average}"
    clean, noised = golden("logits").requires_grad_(), golden("noised_logits").requires_grad_()
    per = "token" if average == "tok" else "sequence"
    criterion = Criterion(
        R3F(preset="fairseq", weight=weight), label_smoothing=0.1, smoothing="fairseq", per=per  # type: ignore[arg-type]
    )  # fmt: skip
    forward = Played(clean, noised, embeds=torch.ones(3, 4, 8))
    report = criterion(Context(forward, labels, kind="tokens"))
    size = golden(f"{key}_sample_size").item()
    close(report.total * size, f"{key}_loss")
    close(report.values["r3f"] * size, f"{key}_log_symm_kl")
    close(report.values["nll"] * size, f"{key}_log_nll")
    report.total.backward()
    assert clean.grad is not None
    assert noised.grad is not None
    close(clean.grad, f"{key}_grad_logits")
    close(noised.grad, f"{key}_grad_noised")
    assert forward.passes == 2


def test_r3f_criterion_in_evaluation(labels: Tensor) -> None:
    criterion = Criterion(R3F(preset="fairseq"), label_smoothing=0.1, smoothing="fairseq")
    forward = Played(golden("logits"))
    with torch.no_grad():
        report = criterion(Context(forward, labels, kind="tokens", training=False))
    close(report.total * golden("ntokens"), "r3f_fwd_eval_loss")
    assert forward.passes == golden("r3f_fwd_eval_ncalls")


@pytest.mark.parametrize("weight", [0.7, 1.0])
def test_r3f_classification(weight: float) -> None:
    key = f"cls_fwd_lam{weight}"
    clean, noised = golden("cls_logits").requires_grad_(), golden("cls_noised_logits").requires_grad_()
    forward = Played(clean, noised, embeds=torch.ones(5, 4, 8))
    report = Criterion(R3F(weight=weight))(Context(forward, golden("cls_target"), kind="classes"))
    size = golden("cls_fwd_sample_size").item()
    close(report.total * size, f"{key}_loss")
    close(report.values["r3f"] * size, f"{key}_log_symm_kl")
    close(report.values["r3f"], "cls_symm_kl")
    report.total.backward()
    assert clean.grad is not None
    assert noised.grad is not None
    close(clean.grad, f"{key}_grad_logits")
    close(noised.grad, f"{key}_grad_noised")


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_noise_is_drawn_as_fairseq_draws_it(kind: Any) -> None:
    torch.manual_seed(7)
    close(draw(kind, (2, 3, 4)) * 1e-5, f"noise_{kind}_seed7")


def test_r4f_head() -> None:
    """fairseq normalises out_proj only; two training passes make two power iterations, evaluation none."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.out_proj = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, features: Tensor) -> Tensor:
            return self.out_proj(torch.tanh(self.dense(features[:, 0])))  # type: ignore[no-any-return]

    head = Head()
    head.load_state_dict(
        {
            "dense.weight": golden("r4f_Wd"),
            "dense.bias": golden("r4f_bd"),
            "out_proj.weight": golden("r4f_W"),
            "out_proj.bias": golden("r4f_b"),
        }
    )
    assert spectral_norm.spectral_norm(head, "out_proj", warmup=0) == ["out_proj"]
    state = head.state_dict()
    u, v = (next(key for key in state if key.endswith(end)) for end in (".u", ".v"))
    state[u], state[v] = golden("r4f_u0"), golden("r4f_v0")
    head.load_state_dict(state)
    features = golden("r4f_feats")
    close(head(features), "r4f_out_train1")
    close(head.state_dict()[u], "r4f_u1")
    close(spectral_norm.folded_state(head)["out_proj.weight"], "r4f_Wsn1")
    close(head(features), "r4f_out_train2")
    head.eval()
    close(head(features), "r4f_out_eval")
