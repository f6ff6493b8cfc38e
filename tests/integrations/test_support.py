"""Every term under every condition of docs/support.md, in one process, and the page itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion, spectral_norm
from seqreg.integrations.hf import context, count, r4f
from seqreg.term import Term
from seqreg.terms.neftune import NEFTune
from seqreg.terms.uegr import UEGR
from tests import support
from tests.helpers import tiny_models
from tests.helpers.engine_cases import R4F, TERMS, settled
from tests.integrations.test_packed import apart, made, packed

Gradients = dict[str, Tensor]
Found = tuple[list[float], Gradients, set[str]]
"""The losses of two steps, the gradients of both, and the paths that were taken."""


def loss_and_gradient(
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    terms: tuple[Term, ...],
    *,
    fused: bool = True,
    batched: bool = True,
    autocast: bool = False,
    start: bool = True,
    steps: Sequence[int] = (0, 1),
) -> Found:
    """Two steps; after each every trained weight moves a little, by itself."""
    criterion = Criterion(*terms, fused=fused, label_smoothing=0.1)
    if start:
        settled(criterion, "llama")
    whole = count(model, list(batches))
    losses, gradients, paths = [], {}, set()
    for step in steps:
        total = 0.0
        torch.manual_seed(step)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                report = criterion(context(model, batch, step=step, count=whole), batched=batched)
            report.total.backward()
            total += float(report.total.detach())
            paths |= set(report.paths.values())
        losses.append(total)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    gradients[f"{step}/{name}"] = parameter.grad.clone()
                parameter.mul_(1.02)
        model.zero_grad()
    return losses, gradients, paths


def compare(found: Found, expected: Found, tolerance: float) -> str:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    apart = torch.stack([(found[1][name] - one).float().norm() for name, one in expected[1].items()]).norm()
    size = torch.stack([one.float().norm() for one in expected[1].values()]).norm()
    assert apart <= tolerance * size
    return "exact" if "plain" in found[2] else "exact and fused"


def llama(**extra: Any) -> Any:
    return tiny_models.make("llama", **extra)


def checkpointing(terms: tuple[Term, ...]) -> str:
    net = llama()
    net.gradient_checkpointing_enable({"use_reentrant": False})
    batch = [tiny_models.batch("llama")]
    return compare(loss_and_gradient(net, batch, terms), loss_and_gradient(llama(), batch, terms), 1e-5)


def lora(terms: tuple[Term, ...]) -> str:
    """The merged model W + s B A has the same losses, and its dW gives those of the adapters: s dW A' and s B' dW."""
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8, init_lora_weights=False)
    batch = [tiny_models.batch("llama")]
    torch.manual_seed(0)
    net = peft.get_peft_model(llama(), config).train()
    if terms and terms[0].name in ("anchor", "bregman"):  # the average of adapters is not that of what they add up to
        slow = loss_and_gradient(copy.deepcopy(net), batch, terms, fused=False)
        return compare(loss_and_gradient(net, batch, terms, batched=False), slow, 1e-4)
    found = loss_and_gradient(copy.deepcopy(net), batch, terms)
    adapters = {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    expected: Found = ([], {}, set())
    criterion = Criterion(*terms, label_smoothing=0.1)
    settled(criterion, "llama")
    for step in range(2):
        merged = copy.deepcopy(net).merge_and_unload().train().requires_grad_(True)
        criterion.load_state_dict(criterion.state_dict())  # the model is another object in every step
        torch.manual_seed(step)
        report = criterion(context(merged, batch[0], step=step, count=count(merged, batch)))
        report.total.backward()
        expected[0].append(float(report.total.detach()))
        plain = dict(merged.named_parameters())
        for name in (name for name in adapters if "lora_A" in name):
            layer = name.removeprefix("base_model.model.").split(".lora_A")[0]
            a, b = adapters[name], adapters[name.replace("lora_A", "lora_B")]
            slope = plain[f"{layer}.weight"].grad
            expected[1][f"{step}/{name}"] = 2.0 * b.t() @ slope
            expected[1][f"{step}/{name.replace('lora_A', 'lora_B')}"] = 2.0 * slope @ a.t()
        with torch.no_grad():
            adapters = {name: one * 1.02 for name, one in adapters.items()}
            for name, parameter in net.named_parameters():
                if name in adapters:
                    parameter.copy_(adapters[name])
    return compare(found, expected, 2e-4)


def autocast(terms: tuple[Term, ...]) -> str:
    batch = [tiny_models.batch("llama")]
    slow = loss_and_gradient(llama(), batch, terms, fused=False, autocast=True)
    exact = loss_and_gradient(llama(), batch, terms, batched=False)
    found = loss_and_gradient(llama(), batch, terms, batched=False, autocast=True)
    assert found[0] == pytest.approx(exact[0], rel=2e-2)
    return compare(found, slow, 2e-2)


def bf16_weights(terms: tuple[Term, ...]) -> str:
    batch = [tiny_models.batch("llama")]
    slow = loss_and_gradient(llama().to(torch.bfloat16), batch, terms, fused=False)
    return compare(loss_and_gradient(llama().to(torch.bfloat16), batch, terms, batched=False), slow, 3e-2)


def packing(terms: tuple[Term, ...]) -> str:
    found = loss_and_gradient(made("eager").double(), [packed()], terms, start=False)
    return compare(found, loss_and_gradient(made("eager").double(), [apart()], terms, start=False), 1e-4)


def absolute(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The same with sizes that do not depend on the RMS of the embeddings of a batch, or hardly."""
    sizes: dict[str, Any] = {"relative": False, "epsilon": 1e-4}
    return tuple(
        dataclasses.replace(term, **{key: value for key, value in sizes.items() if hasattr(term, key)})
        for term in terms
    )


def accumulation(terms: tuple[Term, ...]) -> str:
    """GPT-2, all of which computes in float64; Llama's norms are in float32 whatever it is given."""
    batch = tiny_models.batch("gpt2", rows=6)
    pieces = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 4), slice(4, 6))]
    nets = [tiny_models.dropout_off(tiny_models.make("gpt2")).double() for _ in range(2)]
    found, expected = (
        loss_and_gradient(net, batches, absolute(terms)) for net, batches in zip(nets, (pieces, [batch]), strict=True)
    )
    return compare(found, expected, 1e-4)


def compiled(terms: tuple[Term, ...]) -> str:
    torch._dynamo.reset()
    net, batch = llama(), [tiny_models.batch("llama")]
    net.compile(backend="eager")
    return compare(loss_and_gradient(net, batch, terms), loss_and_gradient(llama(), batch, terms), 1e-5)


def adapters(**settings: Any) -> Callable[[tuple[Term, ...]], str]:
    """Other adapters of PEFT: the loss from all logits is the reference."""

    def work(terms: tuple[Term, ...]) -> str:
        kind = settings.get("kind", peft.LoraConfig)
        config = kind(**{key: value for key, value in settings.items() if key != "kind"})
        torch.manual_seed(0)
        net, batch = peft.get_peft_model(llama(), config).train(), [tiny_models.batch("llama")]
        slow = loss_and_gradient(copy.deepcopy(net), batch, terms, fused=False)
        return compare(loss_and_gradient(net, batch, terms, batched=False), slow, 1e-4)

    return work


_LAYERS: Any = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
WORK: dict[str, Callable[[tuple[Term, ...]], str]] = {
    "compile": compiled,
    "LoRA": lora,
    "DoRA": adapters(**_LAYERS, use_dora=True),
    "IA3": adapters(
        kind=peft.IA3Config,
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "prefix": adapters(kind=peft.PrefixTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=3),
    "LoRA on embeddings": adapters(**{**_LAYERS, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA on head": adapters(**{**_LAYERS, "target_modules": ["lm_head", "q_proj"]}, lora_dropout=0.1),
    "modules_to_save": adapters(**_LAYERS, modules_to_save=["lm_head"]),
    "checkpointing": checkpointing,
    "bf16 autocast": autocast,
    "bf16 weights": bf16_weights,
    "packing": packing,
    "accumulation": accumulation,
}
WITHOUT_DRAWS = ("packing", "accumulation")
"""Conditions that change the shape of what is drawn: there is no dropout, and noise depends on the embedding alone."""


def fixed_noise(patch: pytest.MonkeyPatch) -> None:
    def sample(noise: str, like: Tensor, scale: Any, mask: Tensor | None) -> Tensor:
        drawn = scale * torch.sin(1000 * like.detach())
        return drawn if mask is None else drawn.masked_fill(~mask.unsqueeze(-1), 0.0)

    for place in ("terms.r3f", "terms.neftune", "ascent", "smoothness"):
        patch.setattr(f"seqreg.{place}.sample", sample)


@pytest.mark.filterwarnings("ignore:rdrop. two passes agree exactly", "ignore::UserWarning:peft.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own, of its hasattr
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("condition", WORK)
def test_condition(condition: str, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = support.expected(term, condition)
    terms = TERMS[term]()
    if condition in WITHOUT_DRAWS:
        fixed_noise(monkeypatch)
        terms = {"uegr": (UEGR(weight=0.5, low=0.0, high=0.0),), "neftune": (NEFTune(max_ratio=None),)}.get(term, terms)
    if declared == "refused":
        with pytest.raises(BadInput, match=rf"^{term}: "):
            WORK[condition](terms)
    else:
        assert WORK[condition](terms) == declared


@dataclasses.dataclass(frozen=True)
class Classifier:
    """How R4F is put under a condition.

    Args:
        adapted: puts adapters on the model
        changed: what the condition is; the reference is without it
    """

    adapted: Callable[[Any], Any] = lambda net: net
    changed: Callable[[Any], Any] = lambda net: net
    pieces: int = 1
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4


def with_adapters(kind: Any = peft.LoraConfig, **settings: Any) -> Classifier:
    def adapted(net: Any) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(net, kind(**settings)).train()

    return Classifier(adapted)


def recomputed(net: Any) -> Any:
    net.gradient_checkpointing_enable({"use_reentrant": False})
    return net


def compiled_in_place(net: Any) -> Any:
    torch._dynamo.reset()
    net.compile(backend="eager")
    return net


_ATTENTION: Any = {"target_modules": ["query", "value"], "init_lora_weights": False}
CLASSIFIERS = {
    "compile": Classifier(changed=compiled_in_place),
    "LoRA": with_adapters(**_ATTENTION),
    "DoRA": with_adapters(**_ATTENTION, use_dora=True),
    "IA3": with_adapters(
        peft.IA3Config, target_modules=["key", "value"], feedforward_modules=[], init_ia3_weights=False
    ),
    "prefix": with_adapters(peft.PrefixTuningConfig, task_type="SEQ_CLS", num_virtual_tokens=3),
    "LoRA on embeddings": with_adapters(**{**_ATTENTION, "target_modules": ["word_embeddings", "query"]}),
    "LoRA on head": with_adapters(**{**_ATTENTION, "target_modules": ["out_proj", "query"]}),
    "modules_to_save": with_adapters(**_ATTENTION, modules_to_save=["classifier"]),
    "checkpointing": Classifier(changed=recomputed),
    "bf16 autocast": Classifier(autocast=True, tolerance=2e-2),
    "bf16 weights": Classifier(dtype=torch.bfloat16, tolerance=3e-2),
    "packing": Classifier(),
    "accumulation": Classifier(tiny_models.dropout_off, pieces=2, dtype=torch.float64),
}


CLASSIFIERS_REFUSED = {
    "prefix": "applied 0 times instead of once: .* and no prompt or prefix tuning",
    "LoRA on head": "R4F: the adapters on layer 'classifier.out_proj' of the head are not normalised: train .* whole",
    "packing": "rows are packed, and a classifier has one label a row: give it a document a row",
}


def through_the_norm(net: Any, batch: Mapping[str, Any], terms: tuple[Term, ...], autocast: bool) -> Found:
    """The model whose head has the normalised weights V = W / s has the same losses, and its dV gives
    dW = (dV - <dV, V> u v') / s."""
    expected: Found = ([], {}, set())
    for step in range(2):
        plain = spectral_norm.fold(copy.deepcopy(net))
        losses, slopes, _ = loss_and_gradient(plain, [batch], terms, autocast=autocast, start=False, steps=[step])
        expected[0].extend(losses)
        state = dict(net.named_parameters()) | dict(net.named_buffers())
        for name, slope in slopes.items():
            layer = f"{name.partition('/')[2].removesuffix('weight')}parametrizations.weight"
            if f"{layer}.original" in state:
                weight, u, v = (state[f"{layer}.{part}"].detach() for part in ("original", "0.u", "0.v"))
                size = u @ weight @ v
                slope = (slope - (slope * weight).sum() / size * torch.outer(u, v)) / size
                name = f"{step}/{layer}.original"
            expected[1][name] = slope
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.02 if parameter.requires_grad else 1.0)
    return expected


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own, of its hasattr
@pytest.mark.parametrize("condition", CLASSIFIERS)
def test_r4f_condition(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, terms = CLASSIFIERS[condition], TERMS["r3f"]()
    batch: dict[str, Any] = tiny_models.batch("roberta", rows=6)
    if condition in WITHOUT_DRAWS:
        fixed_noise(monkeypatch)
        terms = absolute(terms)
    if condition == "packing":
        batch["position_ids"] = torch.tensor([[2, 3, 4, 5, 2, 3, 4, 5]] * 6)
        del batch["attention_mask"]

    def found() -> Found:
        net = case.adapted(r4f(tiny_models.make("roberta"), warmup=300)).to(case.dtype)
        size = 6 // case.pieces
        pieces = [{key: value[start : start + size] for key, value in batch.items()} for start in range(0, 6, size)]
        changed = case.changed(copy.deepcopy(net))
        seen = loss_and_gradient(changed, pieces, terms, autocast=case.autocast, start=False)
        assert compare(seen, through_the_norm(net, batch, terms, case.autocast), case.tolerance) == "exact"
        return seen

    if support.expected(R4F, condition) == "refused":
        with pytest.raises(BadInput, match=CLASSIFIERS_REFUSED[condition]) as refused:
            found()
        assert len(refused.value.lines) == 1
    else:
        assert support.expected(R4F, condition) == "exact"
        found()


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_r4f_is_not_put_on_an_adapted_head() -> None:
    with pytest.raises(BadInput, match="R4F: the adapters on layer"):
        r4f(CLASSIFIERS["LoRA on head"].adapted(tiny_models.make("roberta")))


def test_tensor_parallelism_beside_data_parallelism_is_refused() -> None:
    model = llama()
    model._tp_size = 2  # as transformers marks a model with a tp_plan
    with pytest.raises(BadInput, match="the model is cut over 2 of 1 ranks: tensor parallelism is exact over all"):
        context(model, tiny_models.batch("llama"), step=0)


def test_the_page_is_what_the_tests_say() -> None:
    assert support.PAGE.read_text() == support.render(), "run python -m tests.support"
