"""Anchor and DFT: formulas and gradients against slow ones, adapters, accumulation, state, what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from seqreg import BadInput, Context, Criterion, StartAt, build_criterion
from seqreg.errors import Advice
from seqreg.fused.head import Projection
from seqreg.integrations.hf import context, count
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from tests.helpers import tiny_models
from tests.helpers.stubs import Played
from tests.integrations.test_trainer import trainer

MODELS = ("bart", "roberta", "llama")
OUTPUTS = ("kl", "reverse_kl", "symmetric_kl", "js", "k3")
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def move(net: Any, size: float = 0.3) -> None:
    """As an optimizer would: the trained parameters are elsewhere."""
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            noise = size * torch.randn(parameter.shape, generator=drawn, dtype=torch.float64).to(parameter.dtype)
            if parameter.requires_grad:
                parameter.add_(noise * parameter.abs().mean())


def aligned(name: str, net: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and labels of the model itself, one logit row a label."""
    logits, labels = net(**batch).logits, batch["labels"]
    return (logits[:, :-1], labels[:, 1:]) if name in tiny_models.CAUSAL else (logits, labels)


def slow(divergence: str, ref: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """The formula at every position, from all logits."""
    p_ref, p = ref.softmax(-1), own.softmax(-1)
    forward, reverse = ((a * (a.log() - b.log())).sum(-1) for a, b in ((p_ref, p), (p, p_ref)))
    if divergence == "js":
        m = (p_ref + p) / 2
        return ((p_ref * (p_ref / m).log()).sum(-1) + (p * (p / m).log()).sum(-1)) / 2
    if divergence == "k3":
        r = (p_ref / p).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return r - 1 - r.log()
    return {"kl": forward, "reverse_kl": reverse, "symmetric_kl": forward + reverse}[divergence]


def check(net: Any, report: Any, wanted: Tensor) -> None:
    """The same total and the same gradients as a slow loss."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    ours = torch.autograd.grad(report.total, parameters, allow_unused=True)
    theirs = torch.autograd.grad(wanted, parameters, allow_unused=True)
    torch.testing.assert_close(report.total, wanted, rtol=1e-10, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def adapted(name: str, **settings: Any) -> Any:
    net = tiny_models.dropout_off(tiny_models.make(name)).double()
    torch.manual_seed(7)
    target = ["query", "value"] if name == "roberta" else LORA["target_modules"]
    return peft.get_peft_model(net, peft.LoraConfig(**{**LORA, "target_modules": target, **settings})).train().double()


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_formulas_and_gradients(name: str, lora: bool, fused: bool) -> None:
    """All parameters, or adapters, whose reference is the model below them; with the plain and with the DFT loss."""
    plain, batch = tiny_models.dropout_off(tiny_models.make(name)).double(), tiny_models.batch(name)
    net = adapted(name) if lora else copy.deepcopy(plain)
    criterions = {d: Criterion(Anchor(divergence=d, weight=0.7), fused=fused) for d in OUTPUTS}  # type: ignore[arg-type]
    criterions["dft"] = Criterion(Anchor(weight=0.7), loss="dft", fused=fused)
    for criterion in criterions.values():
        criterion(context(net, batch, step=0))
    move(net)
    for what, criterion in criterions.items():
        report = criterion(context(net, batch, step=1))
        own, labels = aligned(name, net, batch)
        kept = labels != -100
        nll = functional.cross_entropy(own[kept], labels[kept], reduction="none")
        base = (nll * own[kept].softmax(-1).gather(1, labels[kept].unsqueeze(1)).squeeze(1).detach()).mean()
        with torch.no_grad():
            ref = aligned(name, plain, batch)[0]
        values = slow("kl" if what == "dft" else what, ref, own, labels)
        assert values[kept].mean() > 1e-6
        check(net, report, (base if what == "dft" else nll.mean()) + 0.7 * values[kept].mean())
        assert report.values["nll"].item() == pytest.approx(nll.mean().item())
        assert report.paths["anchor"] == ("fused" if fused and name != "roberta" else "plain")
        assert bool(criterion.state_dict()) != lora


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    ("name", "settings", "keeps"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}, False),
        ("llama", {"modules_to_save": ["embed_tokens"]}, False),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}, False),
        ("roberta", {"modules_to_save": ["classifier"]}, False),
        ("roberta", {"bias": "all"}, True),
    ],
)
def test_what_else_adapters_train(name: str, settings: dict[str, Any], keeps: bool) -> None:
    """Saved modules are switched off too; biases are the model's own, so that these alone are copied."""
    plain, batch = tiny_models.dropout_off(tiny_models.make(name)).double(), tiny_models.batch(name)
    net, criterion = adapted(name, **settings), Criterion(Anchor(weight=1.0))
    frozen = next(parameter for key, parameter in net.named_parameters() if "lora_A" in key)
    frozen.requires_grad_(False)  # by the user, which switching adapters off and on must not undo
    flags = [parameter.requires_grad for parameter in net.parameters()]
    criterion(context(net, batch, step=0))
    move(net)
    report = criterion(context(net, batch, step=1))
    assert flags == [parameter.requires_grad for parameter in net.parameters()]
    own, labels = aligned(name, net, batch)
    kept = labels != -100
    with torch.no_grad():
        ref = aligned(name, plain, batch)[0]
    wanted = functional.cross_entropy(own[kept], labels[kept]) + slow("kl", ref, own, labels)[kept].mean()
    check(net, report, wanted)
    assert all("bias" in key for key in criterion.state_dict())
    assert bool(criterion.state_dict()) == keeps


@pytest.mark.parametrize("name", MODELS)
def test_l2_is_half_the_squared_distance_of_the_trained_weights(name: str) -> None:
    """Without the new head of a classifier, unless it is asked for."""
    net, batch = tiny_models.dropout_off(tiny_models.make(name)).double(), tiny_models.batch(name)
    next(net.parameters()).requires_grad_(False)
    start = copy.deepcopy(net)
    whole, free = (Criterion(Anchor(divergence="l2", weight=0.3, head=head)) for head in (True, False))
    for criterion in (whole, free):
        criterion(context(net, batch, step=0))
    move(net)
    pairs = list(zip(net.named_parameters(), start.parameters(), strict=True))
    for criterion in (whole, free):
        held = [(p, q) for (key, p), q in pairs if criterion is whole or "classifier" not in key]
        assert (len(held) < len(pairs)) == (criterion is free and name == "roberta")
        own, labels = aligned(name, net, batch)
        nll = functional.cross_entropy(own[labels != -100], labels[labels != -100])
        report = criterion(context(net, batch, step=1))
        check(net, report, nll + 0.3 * sum(((p - q.detach()) ** 2).sum() for p, q in held if p.requires_grad) / 2)


@pytest.mark.parametrize(
    "settings", [{}, {"positions": "all"}, {"per": "sequence"}, {"divergence": "l2"}, {"divergence": "k3"}]
)
def test_accumulation_does_not_matter(settings: dict[str, Any]) -> None:
    """Four micro-batches of two rows, with prompts without labels, of unequal length: one batch of eight."""
    batch = tiny_models.batch("llama", rows=8)
    batch["labels"][:, :2] = -100
    batch["labels"][3, :4] = -100
    found = []
    for pieces in (1, 4):
        net = tiny_models.dropout_off(tiny_models.make("llama")).double()
        criterion = Criterion(Anchor(weight=2.0, **settings), loss="dft")
        rows = [{key: value[i : i + 8 // pieces] for key, value in batch.items()} for i in range(0, 8, 8 // pieces)]
        for step in (0, 1):
            whole = count(net, rows)
            reports = [criterion(context(net, some, step=step, count=whole)) for some in rows]
            if step == 0:
                move(net)
        sum(report.total for report in reports).backward()
        value = sum(float(report.values["anchor"]) for report in reports)
        found.append((value, torch.cat([p.grad.flatten() for p in net.parameters()])))
    (one, gradient), (four, pieced) = found
    assert four == pytest.approx(one, rel=1e-9)
    torch.testing.assert_close(pieced, gradient, rtol=1e-8, atol=1e-12)
    if settings.get("positions") == "all":
        with torch.no_grad():
            own, ref = (
                m(**batch).logits[:, :-1] for m in (net, tiny_models.dropout_off(tiny_models.make("llama")).double())
            )
        real = batch["attention_mask"][:, 1:].bool()
        assert one == pytest.approx(slow("kl", ref, own, batch["labels"][:, 1:])[real].mean().item(), rel=1e-9)
        assert real.sum() > (batch["labels"][:, 1:] != -100).sum()


def test_where_real_positions_are() -> None:
    """A seq2seq target up to its last label; packed documents but for their first tokens; all rows of a classifier."""
    batch = tiny_models.batch("bart")
    batch["labels"][:, 0] = -100
    targets = context(tiny_models.make("bart"), batch).forward.targets
    assert torch.equal(targets, torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2]).bool())
    ids = torch.randint(4, 40, (1, 6))
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "labels": ids}
    assert context(tiny_models.make("llama"), packed).forward.targets.tolist() == [[True, True, False, True, True]]
    assert context(tiny_models.make("roberta"), tiny_models.batch("roberta")).forward.targets.tolist() == [True] * 3


OWN = [[2.0, 0.0, -1.0], [0.5, 0.5, 1.5], [0.0, 3.0, 0.0]]
REFERENCE = [[1.0, 0.5, -0.5], [0.0, 1.0, 1.0], [9.0, 9.0, 0.0]]
LABELS = [0, 2, -100]


def by_hand(preset: str) -> tuple[float, float]:
    """DFT loss and anchor of two labelled positions, in Python's own arithmetic."""
    losses, anchors = [], []
    for own, ref, label in list(zip(OWN, REFERENCE, LABELS, strict=True))[:2]:
        p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (own, ref))
        losses.append(-p[label] * math.log(p[label]))
        ratio = q[label] / p[label]
        anchors.append({
            "asft_paper": sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
            "nemo_rl": ratio - 1 - math.log(ratio),
        }.get(preset, sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))))  # fmt: skip
    return sum(losses) / 2, sum(anchors) / 2


class _Clean(Played):
    """The clean pass gives the first logits, others the second, in whatever order they are made."""

    def run(self, request: Any) -> Any:
        self.passes = 0 if torch.is_grad_enabled() else 1
        return super().run(request)


@pytest.mark.parametrize(
    ("preset", "anchor"),
    [("asft_official", 0.17883002), ("llamafactory", 0.17883002), ("nemo_rl", 0.06280309), ("asft_paper", 0.14929261)],
)
def test_presets_have_the_numbers_of_the_variants(preset: str, anchor: float) -> None:
    own = torch.tensor([OWN], requires_grad=True)
    ctx = Context(_Clean(own, torch.tensor([REFERENCE])), torch.tensor([LABELS]), kind="tokens", step=0)
    report = Criterion(Anchor(preset=preset), loss="dft")(ctx)
    loss, value = by_hand(preset)
    assert value == pytest.approx(anchor, abs=1e-7)
    assert report.parts["base"].item() == pytest.approx(loss, rel=1e-6)
    assert report.values["anchor"].item() == pytest.approx(value, rel=1e-5)
    assert report.total.item() == pytest.approx(loss + 0.1 * value, rel=1e-6)


def test_logits_of_the_reference_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Projection) -> Tensor:
        raise AssertionError("all logits")

    monkeypatch.setattr(Projection, "logits", fail)
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    criterion = Criterion(Anchor(), Anchor(name="ratio", divergence="k3"), Bregman(), label_smoothing=0.1)
    criterion(context(net, batch, step=0))
    move(net)
    report = criterion(context(net, batch, step=1))
    report.total.backward()
    assert set(report.paths.values()) == {"fused"}
    assert report.values["anchor"] > 0 < report.values["bregman"]


@pytest.mark.parametrize("dropout", ["off", "shared", "independent"])
def test_dropout_of_the_reference(dropout: Any) -> None:
    """The model's own pass has dropout; only the same masks make the term 0 at the start."""
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    torch.manual_seed(0)
    value = Criterion(Anchor(dropout=dropout))(context(net, batch, step=0)).values["anchor"]
    assert (value == 0) == (dropout == "shared")
    assert Criterion(Anchor(dropout=dropout)).diagnostics(context(net, batch, step=0))["anchor/drift"] == 0
    assert net.training
    if dropout == "off":
        torch.manual_seed(0)
        own, labels = aligned("bart", net, batch)
        ref = aligned("bart", net.eval(), batch)[0]
        wanted = slow("kl", ref, own, labels)[labels != -100].mean()
        assert value.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_the_start_is_that_of_training_also_if_a_schedule_begins_later() -> None:
    net, batch = tiny_models.dropout_off(tiny_models.make("bart")), tiny_models.batch("bart")
    criterion = Criterion(Anchor(weight=StartAt(0.1, start=1)))
    assert "anchor" not in criterion(context(net, batch, step=0)).parts
    move(net)
    assert criterion(context(net, batch, step=1)).values["anchor"] > 1e-6
    assert not Criterion(Anchor(weight=0.0))(context(net, batch, step=0)).values.get("anchor")


def test_a_reference_that_begins_in_the_middle_is_said() -> None:
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    with pytest.warns(Advice, match=r"^anchor: its reference is the model at step 7, .* load Criterion\.state_dict"):
        Criterion(Anchor())(context(net, batch, step=7))


@pytest.mark.parametrize("divergence", ["kl", "l2"])
def test_resume_is_bit_exact(divergence: Any, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = trainer("bart", tmp_path / "whole", Anchor(divergence=divergence), learning_rate=1e-2, **settings)
    whole.train()
    again = trainer("bart", tmp_path / "again", Anchor(divergence=divergence), learning_rate=1e-2, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    values = [row["value/anchor"] for row in whole.state.log_history if "value/anchor" in row]
    assert values[-1] > 0
    (tmp_path / "whole" / "checkpoint-2" / "seqreg_terms.safetensors").unlink()
    with pytest.raises(BadInput, match=r"seqreg_terms\.safetensors is missing"):
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))


def test_the_average_is_that_of_bregman() -> None:
    net, batch = tiny_models.dropout_off(tiny_models.make("bart")), tiny_models.batch("bart")
    criterion = Criterion(
        Anchor(reference="average", beta=0.9, divergence="symmetric_kl", weight=1.0), Bregman(beta=0.9, beta_late=0.9)
    )
    for step in range(3):
        report = criterion(context(net, batch, step=step))
        move(net)
    assert report.values["anchor"] == report.values["bregman"] > 0


SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("gemma2", {"final_logit_softcapping": 5.0}, "final_logit_softcapping=5.0, the model 30.0"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping=None, the model 50.0"),
        ("granite", {"logits_scaling": 3.0}, "logits_scaling=3.0, the model 1.0"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu', the model 'silu'"),
        ("llama", {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "inv_freq is not that of the"),
    ],
)
def test_a_reference_that_computes_something_else_is_refused(
    name: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(name, **SMALL)
    net = transformers.AutoModelForCausalLM.from_config(config)
    config.update(changed)
    type(net)(config).save_pretrained(tmp_path / "other")
    net.config = transformers.AutoConfig.for_model(name, **SMALL)
    with pytest.raises(BadInput, match=said):
        context(net, tiny_models.batch("llama")).forward.saved_weights(str(tmp_path / "other"))


def test_a_reference_may_differ_in_what_changes_no_output(tmp_path: Path) -> None:
    net = tiny_models.make("llama")
    net.save_pretrained(tmp_path / "start")
    net.config.update({"attention_dropout": 0.3, "use_cache": False, "pad_token_id": 0, "initializer_range": 1.0})
    assert context(net, tiny_models.batch("llama")).forward.saved_weights(str(tmp_path / "start"))


def test_a_folder_is_read_once_and_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tiny_models.batch("bart")
    start = tiny_models.dropout_off(tiny_models.make("bart"))
    start.save_pretrained(tmp_path / "bart")
    tiny_models.make("bart", d_model=8).save_pretrained(tmp_path / "narrow")
    tiny_models.make("bart", encoder_layers=2).save_pretrained(tmp_path / "deep")
    tiny_models.make("llama").save_pretrained(tmp_path / "llama")
    tiny_models.make("bart", activation_function="relu").save_pretrained(tmp_path / "relu")
    (tmp_path / "empty").mkdir()
    net = copy.deepcopy(start)
    net.model.encoder.requires_grad_(False)  # it may differ from the reference in what is not trained as well
    with torch.no_grad():
        for parameter in net.model.encoder.layers.parameters():
            parameter.mul_(3.0)
    criterion = Criterion(Anchor(reference=str(tmp_path / "bart")))
    state = torch.get_rng_state()
    context(net, batch).forward.saved_weights(str(tmp_path / "bart"))
    assert torch.equal(state, torch.get_rng_state())
    report = criterion(context(net, batch, step=0))
    assert criterion.state_dict() == {}
    own, labels = aligned("bart", net, batch)
    wanted = slow("kl", aligned("bart", start, batch)[0], own, labels)[labels != -100].mean()
    assert report.values["anchor"].item() == pytest.approx(wanted.item(), rel=1e-4)
    monkeypatch.setattr(type(net), "from_pretrained", None)
    criterion(context(net, batch, step=1))
    monkeypatch.undo()
    lines = {
        "narrow": r"model\.shared\.weight is \[48, 8\] there and \[48, 16\] in the model",
        "deep": r"it also has model\.encoder\.layers\.1\..*, unlike the model",
        "llama": r"model\.decoder\..* is missing there, for a BartForConditionalGeneration",
        "relu": r"its config\.json has activation_function='relu', the model 'gelu'",
        "empty": r"BartForConditionalGeneration\.from_pretrained cannot read it: .*",
    }
    for folder, line in lines.items():
        with pytest.raises(BadInput, match=rf"^anchor: reference='.*{folder}': {line}$") as caught:
            Criterion(Anchor(reference=str(tmp_path / folder)))(context(net, batch, step=0))
        assert len(caught.value.lines) == 1
    classifier = tiny_models.make("roberta")
    classifier.roberta.save_pretrained(tmp_path / "headless")
    with pytest.raises(BadInput, match=r"classifier\.dense\.bias is missing there"):
        Criterion(Anchor(reference=str(tmp_path / "headless")))(
            context(classifier, tiny_models.batch("roberta"), step=0)
        )


BAD: list[tuple[Any, str]] = [
    (lambda: Anchor(reference="strat"), "reference='strat': expected 'start', 'average', or a folder"),
    (lambda: Anchor(beta=1.0), "beta=1.0: expected a number in (0, 1)"),
    (lambda: Anchor(divergence="k3", positions="all"), "positions='all': k3 is of labels"),
    (lambda: Anchor(divergence="l2", positions="all"), "positions='all': l2 is of weights"),
    (lambda: Anchor(head=True), "head=True: it is for divergence='l2'"),
    (lambda: Anchor(divergence="reverse"), "did you mean 'reverse_kl'?"),
    (lambda: Criterion(loss="dtf"), "loss='dtf': choose 'nll' or 'dft'"),
    (lambda: Criterion(loss="dft", label_smoothing=0.1), "loss='dft' has no label smoothing: set label_smoothing=0.1"),
    (lambda: build_criterion({"loss": "dft", "label_smoothing": 0.1}), "loss='dft' has no label smoothing"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert message in str(caught.value)


def test_what_a_model_cannot_give_is_refused(tmp_path: Path) -> None:
    adapters, batch = adapted("llama"), tiny_models.batch("llama")
    tiny_models.make("llama").save_pretrained(tmp_path)
    for term, message in (
        (Anchor(divergence="l2"), "the weights that are trained are those of adapters"),
        (Anchor(reference=str(tmp_path)), "with adapters the reference is the model they were put on"),
    ):
        with pytest.raises(BadInput, match=message):
            Criterion(term)(context(adapters, batch, step=0))
    regression = tiny_models.make("roberta", num_labels=1)
    rows = {**tiny_models.batch("roberta"), "labels": torch.rand(3)}
    for criterion, message in (
        (Criterion(Anchor()), "use divergence='mse'"),
        (Criterion(Anchor(divergence="k3")), "use 'mse'"),
        (Criterion(loss="dft"), "loss='dft' means nothing on a regression head"),
    ):
        with pytest.raises(BadInput, match=message):
            criterion(context(regression, rows, step=0))
    assert Criterion(Anchor(divergence="mse"))(context(regression, rows, step=0)).values["anchor"] >= 0
    unknown = Context(_Clean(torch.zeros(1, 2, 3), torch.ones(1, 2, 3)), torch.tensor([[1, 2]]), kind="tokens")
    with pytest.raises(BadInput, match="use on='labels'"):
        Criterion(Anchor(positions="all"))(unknown)


def test_dft_is_the_task_of_every_pass() -> None:
    """R-Drop's second task loss is of the same kind."""
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    torch.manual_seed(0)
    report = Criterion(RDrop(weight=1.0), loss="dft")(context(net, batch, step=0))
    assert report.parts["base"] < report.values["nll"]
    assert report.tasks["rdrop"] < report.values["nll"]
    assert repr(Criterion(loss="dft")).endswith("loss='dft')")


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("term", [R3F(weight=1.0), RDrop(task="none")])
def test_dropout_of_adapters_is_noise_enough(term: Any, recwarn: pytest.WarningsRecorder) -> None:
    """On a model without dropout R3F's and R-Drop's two passes differ by that of LoRA."""
    gradients = {}
    for rate in (0.0, 0.2):
        net, batch = adapted("llama", lora_dropout=rate).float(), tiny_models.batch("llama")
        torch.manual_seed(0)
        report = Criterion(term)(context(net, batch, step=0))
        torch.manual_seed(0)
        base = Criterion()(context(net, batch, step=0))
        (report.total - base.total).backward()
        gradients[rate] = max(float(p.grad.norm()) for p in net.parameters() if p.grad is not None)
        assert (report.values[term.name] > 1e-4) == (rate > 0)
        said = [str(one.message) for one in recwarn if issubclass(one.category, Advice)]
        assert len(said) == 1  # without dropout; with it nothing is added
        assert "lora_dropout" in said[0]
    assert gradients[0.2] > 1e-3


@pytest.mark.parametrize("term", [Anchor(), Bregman()])
def test_what_is_kept_of_one_model_is_not_held_against_another(term: Any) -> None:
    criterion, batch = Criterion(term), tiny_models.batch("bart")
    first, second = (tiny_models.make("bart", seed=seed) for seed in (0, 1))
    criterion(context(first, batch, step=0))
    with pytest.raises(BadInput, match=f"{term.name}: what it keeps from step to step is of another model"):
        criterion(context(second, batch, step=0))
    criterion(context(first, batch, step=1))
    state = criterion.state_dict()
    criterion.load_state_dict(state)  # of a checkpoint: the model is another object then
    criterion(context(second, batch, step=2))
