"""Facts of a model are found once, found again after every change of it, and keep nothing alive."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BartConfig, BartForConditionalGeneration

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import context, r4f
from seqreg.integrations.hf.facts import ModelFacts
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True`")


def shown(facts: ModelFacts) -> dict[str, Any]:
    """All that is asked of facts, so that two of them can be compared."""
    return {
        **{name: getattr(facts, name) for name in ("task", "engine", "takes_cache", "checkpointing", "head")},
        **{name: getattr(facts, name) for name in ("module", "adapted", "reuses_encoder", "no_double_backward")},
        "stacks": dict(facts.stacks),
    }


def lora(net: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2))


def parametrize(net: Any) -> None:
    nn.utils.parametrizations.spectral_norm(net.model.decoder.layers[0].fc1)


def exchange_head(net: Any) -> None:
    net.lm_head = nn.Linear(net.lm_head.in_features, net.lm_head.out_features)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "resized embeddings": lambda net: net.resize_token_embeddings(net.config.vocab_size + 8),
    "checkpointing": lambda net: net.gradient_checkpointing_enable({"use_reentrant": False}),
    "reentrant checkpointing": lambda net: net.gradient_checkpointing_enable({"use_reentrant": True}),
    "spectral norm": parametrize,
    "a parametrized head": lambda net: nn.utils.parametrize.register_parametrization(net.lm_head, "weight", Twice()),
    "another head": exchange_head,
    "a hook on the head": lambda net: net.lm_head.register_forward_hook(lambda *_: None),
    "a hook on the encoder": lambda net: net.model.encoder.register_forward_hook(lambda *_: None),
    "another forward": lambda net: setattr(net, "forward", net.forward),
    "another forward around the encoder": lambda net: setattr(net.model, "forward", net.model.forward),
    "adapters inside": lora,
    "frozen": lambda net: net.requires_grad_(False),
    "compiled in place": lambda net: net.compile(),
    "quantised": lambda net: setattr(net, "is_quantized", True),
    "a layer more": lambda net: net.model.encoder.layers.append(copy.deepcopy(net.model.encoder.layers[0])),
}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("change", CHANGES)
def test_facts_follow_a_change(change: str) -> None:
    net = tiny_models.make("bart")
    before = ModelFacts.of(net)
    assert ModelFacts.of(net) is before
    CHANGES[change](net)
    assert shown(ModelFacts.of(net)) == shown(ModelFacts(net))


@pytest.mark.parametrize("change", ["resized embeddings", "spectral norm", "another head", "adapters inside"])
def test_an_exchanged_module_outdates_the_facts(change: str) -> None:
    net = tiny_models.make("bart")
    before = ModelFacts.of(net)
    CHANGES[change](net)
    assert before.outdated()


def test_checkpointing_is_seen_when_it_is_switched() -> None:
    net = tiny_models.make("bart").train()
    assert not context(net, tiny_models.batch("bart")).forward.recomputes
    net.gradient_checkpointing_enable({"use_reentrant": True})
    forward = context(net, tiny_models.batch("bart")).forward
    assert (forward.recomputes, forward.reentrant, forward.reuse) == (True, True, None)
    net.gradient_checkpointing_disable()
    forward = context(net, tiny_models.batch("bart")).forward
    assert (forward.recomputes, forward.reentrant) == (False, False)
    assert forward.reuse is not None


def test_layerdrop_and_mode_are_seen_when_they_change() -> None:
    net, batch = tiny_models.make("bart").train(), tiny_models.batch("bart")
    assert not context(net, batch).forward.drops_layers
    net.config.encoder_layerdrop = 0.5
    assert context(net, batch).forward.drops_layers
    assert not context(net.eval(), batch).forward.drops_layers


def test_ids_are_checked_against_resized_embeddings() -> None:
    net, batch = tiny_models.make("bart").eval(), tiny_models.batch("bart")
    context(net, batch)
    batch["input_ids"][0, 0] = net.config.vocab_size
    with pytest.raises(BadInput, match="but the model embeds"):
        context(net, batch)
    net.resize_token_embeddings(net.config.vocab_size + 1)
    context(net, batch)


def test_adapters_are_seen_when_they_are_switched_and_merged() -> None:
    net = tiny_models.make("bart").train()
    assert ModelFacts.of(net).adapted is None
    adapted = lora(net)
    assert ModelFacts.of(adapted).adapted is adapted
    head = adapted.get_base_model().lm_head
    assert ModelFacts.of(adapted).head is head  # with one adapter, a wider linear layer
    adapted.add_adapter("second", copy.copy(adapted.peft_config["default"]))
    adapted.base_model.set_adapter(["default", "second"])
    assert ModelFacts.of(adapted).head is None
    adapted.base_model.set_adapter("second")
    assert ModelFacts.of(adapted).head is head
    merged = adapted.merge_and_unload()
    facts = ModelFacts.of(merged)
    assert facts.adapted is None
    assert type(facts.head) is nn.Linear
    assert facts.reuses_encoder
    assert not any(hasattr(stack.embedding, "lora_A") for stack in facts.stacks.values())


def test_a_wrapper_has_facts_of_its_own(one_rank: None) -> None:
    net = tiny_models.make("bart")
    assert (ModelFacts.of(net).engine, ModelFacts.of(net).reuses_encoder) == ("", True)
    wrapped = DistributedDataParallel(net)
    assert (ModelFacts.of(wrapped).engine, ModelFacts.of(wrapped).reuses_encoder) == ("DDP", False)
    assert ModelFacts.of(wrapped).module is net
    assert ModelFacts.of(net).engine == ""
    compiled = torch.compile(net)
    assert ModelFacts.of(compiled).module is net
    assert not ModelFacts.of(compiled).reuses_encoder


def test_a_parameter_that_ddp_does_not_hold_is_seen_when_it_learns(one_rank: None) -> None:
    net = tiny_models.make("bart")
    wrapped = nn.Sequential(DistributedDataParallel(net.model))
    head = copy.deepcopy(net.lm_head).requires_grad_(False)
    net.model, net.lm_head = wrapped[0], head
    assert ModelFacts.of(net).engine == "DDP"
    head.requires_grad_(True)
    with pytest.raises(BadInput, match="does not hold lm_head"):
        ModelFacts.of(net)


def test_a_classifier_normalised_after_a_batch_is_seen() -> None:
    net, batch = tiny_models.make("roberta"), tiny_models.batch("roberta")
    context(net.train(), batch, step=0)
    r4f(net)
    assert ModelFacts.of(net).task == "classification"
    assert Criterion(R3F())(context(net, batch, step=0)).total.isfinite()


def test_facts_keep_no_model_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        for name in ("bart", "roberta", "gpt2"):
            net = tiny_models.make(name)
            context(net, tiny_models.batch(name), step=0)
            kept = weakref.ref(net)
            del net
            assert kept() is None, name
    finally:
        gc.enable()


def test_copies_and_files_of_a_model_have_none() -> None:
    net = tiny_models.make("bart")
    ModelFacts.of(net)
    other = copy.deepcopy(net)
    assert ModelFacts.of(other).module is other
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert ModelFacts.of(read).module is read
    assert net.state_dict().keys() == read.state_dict().keys()


def test_a_context_of_24_layers_costs_under_a_millisecond() -> None:
    """Prints the CPU time of one context of BART with 12 and 12 layers: `pytest -s -k 24_layers`."""
    sizes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in [
        ("layers", 12), ("attention_heads", 2), ("ffn_dim", 16)]}  # fmt: skip
    net = BartForConditionalGeneration(BartConfig(vocab_size=99, d_model=16, max_position_embeddings=64, **sizes))
    ids = torch.randint(4, 99, (4, 10))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :8]}
    context(net.train(), batch, step=0)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(20):
            context(net, batch, step=0)
        seconds.append((time.process_time() - start) / 20)
    print(f"context() of {len(list(net.modules()))} modules: {min(seconds) * 1000:.2f} ms of CPU")
    assert min(seconds) < 0.001
