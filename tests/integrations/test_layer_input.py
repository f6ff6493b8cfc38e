"""A pass that begins at a layer: values and gradients against passes that run everything, operations exactly."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.worker_process import count_flops
from seqreg import BadInput, Criterion, build_term
from seqreg.forward import Perturbation
from seqreg.integrations.hf import context
from seqreg.terms import r3f
from tests.helpers.tiny_configs import tiny
from tests.integrations.test_encoder_reuse import SMALL, in_float64

BERT = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1,
)  # fmt: skip
LLAMA = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=32, attention_dropout=0.2,
)  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "bart": (
        lambda: BartForConditionalGeneration(BartConfig(vocab_size=50, **SMALL)),
        {"encoder": "model.encoder.layers", "decoder": "model.decoder.layers"},
    ),
    "bert": (lambda: BertForMaskedLM(BertConfig(**BERT)), {"encoder": "bert.encoder.layer"}),
    "roberta": (
        lambda: RobertaForSequenceClassification(RobertaConfig(**BERT, num_labels=3)),
        {"encoder": "roberta.encoder.layer"},
    ),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), {"decoder": "model.layers"}),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.2,
                     decoder_start_token_id=0)
        ),
        {"encoder": "encoder.block", "decoder": "decoder.block"},
    ),
}  # fmt: skip
"""Models of two or three layers, and where their layers are."""
SMOOTHING, SEED = 0.1, 11


def batch_for(name: str) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    source, labels = (torch.randint(4, 50, size, generator=drawn) for size in ((3, 9), (3, 6)))
    mask = torch.ones_like(source)
    mask[1, 6:], labels[2, 4:] = 0, -100
    if name in ("bert", "llama"):
        labels = source.masked_fill(mask == 0, -100)
    if name == "roberta":
        labels = torch.tensor([0, 2, 1])
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def noise_like(states: torch.Tensor) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(states.shape[1])
    return 0.3 * torch.randn(states.shape, generator=drawn, dtype=states.dtype)


class SlowPasses:
    """Two whole passes; at the layer the second one is given the input that the first one had there, plus noise."""

    def __init__(self, model: Any, name: str, site: str, layer: int, dropout: str, noise: Any) -> None:
        self.model, self.name, self.dropout, self.noise = model, name, dropout, noise
        self.layer = operator.attrgetter(MODELS[name][1][site])(model)[layer]
        self.encoder = model.get_encoder() if site == "decoder" and name in ("bart", "t5") else None
        self.seen: list[Any] = []

    def at_layer(self, module: Any, arguments: Any, options: Any) -> Any:
        states = arguments[0] if arguments else options["hidden_states"]
        if len(self.seen) == 0:
            self.seen += [states, torch.get_rng_state()]
            return None
        if self.dropout == "shared":
            torch.set_rng_state(self.seen[1])
        else:
            torch.manual_seed(SEED)
        changed = self.seen[0] + self.noise(self.seen[0])
        return ((changed, *arguments[1:]), options) if arguments else ((), {**options, "hidden_states": changed})

    def after_encoder(self, module: Any, arguments: Any, output: Any) -> Any:
        if len(self.seen) < 3:
            self.encoded = output
        return self.encoded

    def logits(self, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if self.name in ("bart", "t5"):
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        handles = [self.layer.register_forward_pre_hook(self.at_layer, with_kwargs=True)]
        if self.encoder is not None:
            handles.append(self.encoder.register_forward_hook(self.after_encoder))
        first = self.model(**inputs).logits
        self.seen.append("second")
        second = self.model(**inputs).logits
        for handle in handles:
            handle.remove()
        return [view[:, :-1] if self.name == "llama" else view for view in (first, second)]


def slow_loss(term: str, settings: Any, logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    flat = [view.flatten(0, -2) for view in logits]
    task = [functional.cross_entropy(view, labels.flatten(), label_smoothing=SMOOTHING) for view in flat]
    p, q = (view[labels.flatten() != -100].log_softmax(-1) for view in flat)
    if settings.get("grad") == "clean":
        q = q.detach()
    apart = ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()
    return task[0] + (2.0 * apart if term == "r3f" else task[1] + 0.7 / 2 * apart)


CASES = [
    (name, term, site, layer, settings)
    for name, (_, sites) in MODELS.items()
    for site in sites
    for layer in (0, 1)
    for term, settings in (
        ("r3f", {"dropout": "independent"}),
        ("r3f", {"dropout": "shared"}),
        ("r3f", {"dropout": "shared", "grad": "clean"}),
        ("rdrop", {}),
    )
]


@pytest.mark.parametrize(("name", "term", "site", "layer", "settings"), CASES)
def test_values_and_gradients_are_those_of_whole_passes(
    name: str, term: str, site: str, layer: int, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "t5":
        in_float64(monkeypatch)
    monkeypatch.setattr(r3f, "sample", lambda noise, states, *_: noise_like(states))
    torch.manual_seed(0)
    model = MODELS[name][0]().double().train()
    batch = batch_for(name)

    slow = SlowPasses(
        model, name, site, layer, settings.get("dropout", "independent"),
        noise_like if term == "r3f" else torch.zeros_like,
    )  # fmt: skip
    torch.manual_seed(5)
    labels = batch["labels"][:, 1:] if name == "llama" else batch["labels"]
    expected = slow_loss(term, settings, slow.logits(batch), labels)
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    model.zero_grad(set_to_none=True)
    passes: list[int] = []

    def seed_the_second(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 2 and settings.get("dropout", "independent") == "independent":
            torch.manual_seed(SEED)

    slow.layer.register_forward_pre_hook(seed_the_second)
    torch.manual_seed(5)
    built = build_term(term, {"where": site, "layer": layer, **({"weight": 2.0} if term == "r3f" else {}), **settings})
    report = Criterion(built, label_smoothing=SMOOTHING)(context(model, batch, step=0))
    report.total.backward()
    assert float(report.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-8, atol=1e-12, msg=key)


def cost(model: Any, batch: Any, term: str | None = None, **settings: Any) -> int:
    terms = [] if term is None else [build_term(term, settings)]
    criterion = Criterion(*terms, label_smoothing=SMOOTHING)
    return count_flops(lambda: criterion(context(model, batch, step=0)).total.backward())


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("term", ["r3f", "rdrop"])
def test_only_the_layers_above_are_computed_again(name: str, term: str) -> None:
    """What a layer costs is known from models with one layer less."""
    batch, scale = batch_for(name), {"scale": 0.1} if term == "r3f" else {}
    make, config = (BertForMaskedLM, BertConfig) if name == "bert" else (LlamaForCausalLM, LlamaConfig)
    options = BERT if name == "bert" else LLAMA
    plain = [cost(make(config(**{**options, "num_hidden_layers": n})).train(), batch) for n in (1, 2, 3)]
    per_layer = plain[2] - plain[1]
    assert plain[1] - plain[0] == per_layer > 0
    model = make(config(**options)).train()
    whole = cost(model, batch, term, **scale)
    assert whole == 2 * plain[2]
    for layer in range(3):
        assert cost(model, batch, term, layer=layer, **scale) == whole - layer * per_layer


def test_the_encoder_is_not_computed_again_for_the_decoder() -> None:
    batch = batch_for("bart")
    model = MODELS["bart"][0]().train()
    calls: list[str] = []
    for name, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        for number, layer in enumerate(stack.layers):
            layer.self_attn.register_forward_hook(lambda *_, label=f"{name} {number}": calls.append(label))
    once = ["encoder 0", "encoder 1", "decoder 0", "decoder 1"]
    for where, layer, again in (
        ("encoder", 1, ["encoder 1", "decoder 0", "decoder 1"]),
        ("decoder", 0, ["decoder 0", "decoder 1"]),
        ("decoder", 1, ["decoder 1"]),
    ):
        calls.clear()
        Criterion(build_term("rdrop", {"where": where, "layer": layer}))(context(model, batch, step=0))
        assert calls == once + again


def test_other_terms_have_their_passes_beside_it() -> None:
    """Two layers at once, a term that is batched elsewhere, and noise on the input (NEFTune)."""
    torch.manual_seed(0)
    model, batch = MODELS["bart"][0]().train(), batch_for("bart")
    parts = (
        build_term("r3f", {"layer": 1, "scale": 0.1, "dropout": "shared"}),
        build_term("rdrop", {"layer": 1, "where": "decoder", "name": "upper"}),
        build_term("rdrop", {}),
        build_term("neftune", {}),
    )
    report = Criterion(*parts)(context(model, batch, step=0))
    report.total.backward()
    assert all(float(report.values[name]) > 0 for name in ("r3f", "upper", "rdrop"))
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_passes_of_other_terms_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast SMART replays the clean pass in float32 and without a graph: the layers below keep theirs."""
    monkeypatch.setattr(r3f, "sample", lambda noise, states, *_: noise_like(states))
    torch.manual_seed(0)
    model = MODELS["bart"][0]().train()
    found = []
    for names in (("r3f",), ("smart", "r3f")):
        model.zero_grad(set_to_none=True)
        settings = {"r3f": {"layer": 1, "scale": 0.1, "weight": 1e3, "dropout": "shared"}, "smart": {"weight": 1e-12}}
        criterion = Criterion(*(build_term(name, settings[name]) for name in names))
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            report = criterion(context(model, batch_for("bart"), step=0))
        report.total.backward()
        below = model.get_encoder().layers[0].fc1.weight.grad
        found.append((float(report.values["r3f"]), below.clone()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-3 * float(found[0][1].abs().max()))


def test_another_source_is_not_kept() -> None:
    """The gap of the source has a pass without dropout over the sources of other rows."""
    torch.manual_seed(0)
    model, batch = MODELS["bart"][0]().double().train(), batch_for("bart")
    forward = context(model, batch, step=0).forward
    forward.keep_input("encoder", 1)
    forward.clean()
    forward.other_source()
    with torch.no_grad():
        straight = forward(dropout="off").logits
        resumed = forward(Perturbation({"encoder": torch.zeros(())}, point=1), dropout="off").logits
    assert torch.equal(resumed, straight)


def halved(_: Any, __: Any, output: Any) -> Any:
    return type(output)(last_hidden_state=output.last_hidden_state / 2)


def halved_in_place(_: Any, __: Any, output: Any) -> None:
    output.last_hidden_state = output.last_hidden_state / 2


@pytest.mark.parametrize("hook", [halved, halved_in_place])
def test_what_a_hook_makes_of_the_encoder_is_made_once(hook: Any) -> None:
    """The decoder reads what the hook made of the encoder's output in the clean pass."""
    torch.manual_seed(0)
    model, batch = MODELS["bart"][0]().double().train(), batch_for("bart")
    model.get_encoder().register_forward_hook(hook)
    for parameter in model.get_decoder().layers.parameters():
        parameter.data *= 10  # else it hardly looks at the source
    forward = context(model, batch, step=0).forward
    forward.keep_input("decoder", 0)
    forward.reuse = None
    with torch.no_grad():
        straight = forward.clean().logits
        resumed = forward(Perturbation({"decoder": torch.zeros(())}, point=0), dropout="shared").logits
    assert torch.equal(resumed, straight)
    assert len(model.get_encoder()._forward_hooks) == 1


def test_without_dropout_the_reference_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """dropout="off" on a model in training is any dropout on one in evaluation mode."""
    monkeypatch.setattr(r3f, "sample", lambda noise, states, *_: noise_like(states))
    torch.manual_seed(0)
    model, batch = MODELS["bart"][0]().train(), batch_for("bart")
    off, shared = (
        Criterion(build_term("r3f", {"layer": 1, "scale": 0.1, "dropout": dropout})) for dropout in ("off", "shared")
    )
    found = off(context(model, batch, step=0)).values["r3f"]
    expected = shared(context(model.eval(), batch, step=0), training=True).values["r3f"]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(found) > 0


def test_diagnostics_know_the_layer() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["bart"][0]().train(), batch_for("bart")
    criterion = Criterion(build_term("r3f", {"layer": 1, "scale": 0.1, "relative": True}))
    numbers = criterion.diagnostics(context(model, batch, step=0))
    assert numbers["r3f/delta_over_embedding"] == pytest.approx(0.1, rel=0.2)
    assert numbers["r3f/dropout_over_value"] > numbers["r3f/noise_over_value"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 2}, "layer=2: the encoder has 2 layers: expected 0 to 1"),
        ({"layer": -1}, "from 0"),
        ({"layer": 1, "where": "both"}, "one stack"),
        ({"layer": 1, "inject": "word"}, "inject='scaled'"),
        ({"layer": 1, "example_fraction": 0.5}, "of all examples"),
        ({"layer": 0.5}, "layer=0.5"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: Any, message: str) -> None:
    model = MODELS["bart"][0]().train()
    with pytest.raises(BadInput, match=message):
        Criterion(build_term("r3f", {"scale": 0.1, **settings}))(context(model, batch_for("bart"), step=0))


def test_models_that_cannot_are_named() -> None:
    model, batch = MODELS["bart"][0]().train(), batch_for("bart")
    term = build_term("rdrop", {"layer": 1})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(BadInput, match="gradient checkpointing"):
        Criterion(term)(context(model, batch, step=0))
    model.gradient_checkpointing_disable()
    model.config.encoder_layerdrop = 0.5
    with pytest.raises(BadInput, match="layerdrop"):
        Criterion(term)(context(model, batch, step=0))
    with pytest.raises(BadInput, match="layer=0, or leave where out"):
        build_term("rdrop", {"where": "decoder"})
    shared = AlbertForSequenceClassification(AlbertConfig(**BERT, embedding_size=8, num_labels=3)).train()
    with pytest.raises(BadInput, match="once per pass"):
        Criterion(build_term("rdrop", {"layer": 0}))(context(shared, batch_for("roberta"), step=0))
    keys_of_below = Gemma4ForCausalLM(
        tiny("gemma4_text", num_kv_shared_layers=1, layer_types=["full_attention"] * 6)
    ).train()
    with pytest.raises(BadInput, match=r"^layer=5: Gemma4ForCausalLM cannot begin there, as a layer of it takes more"):
        Criterion(build_term("rdrop", {"layer": 5}))(context(keys_of_below, batch_for("llama"), step=0))
    assert all("forward" not in vars(module) for module in keys_of_below.modules())
