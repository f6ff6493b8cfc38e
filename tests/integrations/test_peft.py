"""PEFT adapters: loss and gradient are those of the wrapped model's own loss."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import context
from seqreg.integrations.hf.model import stacks, unwrap
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from tests.helpers import tiny_models

SEQ2SEQ = ("bart", "pegasus", "t5")


def layers(name: str) -> list[str]:
    return {"t5": ["q", "v"], "gpt2": ["c_attn"]}.get(name, ["q_proj", "v_proj"])


def adapters(name: str) -> dict[str, Any]:
    """Configurations of every kind that touches embeddings or head."""
    embed, own = "wte" if name == "gpt2" else "embed_tokens", layers(name)
    lora: dict[str, Any] = {"init_lora_weights": False, "fan_in_fan_out": name == "gpt2"}
    return {
        "lora": peft.LoraConfig(target_modules=[embed, *own], **lora),
        "dora": peft.LoraConfig(target_modules=[embed, *own], use_dora=True, **lora),
        "lora_on_head": peft.LoraConfig(target_modules=[embed, "lm_head", *own], **lora),
        "dora_on_head": peft.LoraConfig(target_modules=["lm_head", *own], use_dora=True, **lora),
        "saved_head": peft.LoraConfig(target_modules=own, modules_to_save=["lm_head"], **lora),
        "saved_embeddings": peft.LoraConfig(target_modules=own, modules_to_save=[embed], **lora),
        "ia3": peft.IA3Config(target_modules=own, feedforward_modules=[], fan_in_fan_out=name == "gpt2"),
        "tokens": peft.TrainableTokensConfig(token_indices=[4, 5, 6, 7], target_modules=[embed], init_weights=False),
    }


def adapted(name: str, kind: str) -> Any:
    net = peft.get_peft_model(tiny_models.make(name), adapters(name)[kind])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:  # adapters that begin as nothing would prove nothing
                parameter.add_(0.3 * torch.randn_like(parameter))
    return net.train()


def gradients(net: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


def check_against_own_loss(net: Any, batch: dict[str, Tensor], fused: bool) -> None:
    torch.manual_seed(0)
    theirs = net(**batch).loss
    theirs.backward()
    wanted = gradients(net)
    torch.manual_seed(0)
    report = Criterion(fused=fused)(context(net, batch))
    report.total.backward()
    found = gradients(net)
    assert report.total.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_lora_on_the_embeddings_of_both_stacks(name: str, fused: bool) -> None:
    """Two adapters over one tied table are two embeddings."""
    net, batch = adapted(name, "lora"), tiny_models.batch(name)
    check_against_own_loss(net, batch, fused)
    tables = {stack: found.embedding for stack, found in stacks(unwrap(net)).items()}
    for term in (R3F(scale=1e-2, relative=True), R3F(scale=1e-2, relative=True, dropout="shared"), RDrop()):
        tiny_models.dropout_off(net)
        own = net(**batch).loss.item()
        report = Criterion(term, fused=fused)(context(net, batch, step=1))
        assert report.parts["base"].item() == pytest.approx(own, rel=1e-5)
        report.total.backward()
        for table in tables.values():
            assert table.lora_embedding_A["default"].grad.norm() > 0
        net.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    "kind", ["dora", "lora_on_head", "dora_on_head", "saved_head", "saved_embeddings", "ia3", "tokens"]
)
@pytest.mark.parametrize("name", ["bart", "t5", "gpt2"])
def test_dora_and_other_adapters_agree_with_their_model(name: str, kind: str) -> None:
    net, batch = adapted(name, kind), tiny_models.batch(name)
    check_against_own_loss(net, batch, True)
    if kind in ("saved_head", "lora_on_head"):
        assert Criterion()(context(net, batch)).paths["base"] == "fused"


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_the_scale_inside_an_adapted_embedding_is_seen() -> None:
    """M2M100 multiplies inside its embedding, which PEFT wraps."""
    plain, wrapped = stacks(tiny_models.make("m2m100")), stacks(unwrap(adapted("m2m100", "lora")))
    assert {name: stack.inner for name, stack in wrapped.items()} == dict.fromkeys(plain, 4.0)
    assert {name: stack.inner for name, stack in plain.items()} == dict.fromkeys(plain, 4.0)


def test_prompt_tuning_is_refused_by_name() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    net = peft.get_peft_model(tiny_models.make("llama"), config).train()
    with pytest.raises(BadInput, match=r"^PROMPT_TUNING: virtual tokens have no labels: use LoRA, or prefix tuning$"):
        context(net, tiny_models.batch("llama"))


def on_head(**settings: Any) -> Any:
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False, **settings)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_models.make("llama"), config).train()


def test_a_context_sees_what_the_optimizer_did_to_a_lora_head() -> None:
    net, batch = on_head(), tiny_models.batch("llama")
    ctx, criterion = context(net, batch), Criterion()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    first = criterion(ctx)
    first.total.backward()
    optimizer.step()
    torch.manual_seed(1)
    second = criterion(ctx).total.item()
    torch.manual_seed(1)
    assert second == pytest.approx(Criterion(fused=False)(context(net, batch)).total.item(), rel=1e-6)
    assert second != pytest.approx(first.total.item(), rel=1e-3)


def test_small_adapters_count_beside_a_head_in_bf16() -> None:
    """Added to W they would be rounded away; autocast computes in bf16 too."""
    batch = tiny_models.batch("llama")
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        net = tiny_models.dropout_off(on_head())
        for name, parameter in net.named_parameters():
            parameter.data = parameter.data if "lora_" in name else parameter.data.to(dtype)
        with torch.no_grad():
            net.get_base_model().lm_head.base_layer.weight.fill_(1.0)  # each class alike: the adapter decides
            net.get_base_model().lm_head.lora_B["default"].weight.mul_(1e-2)
        found = []
        for fused in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                report = Criterion(fused=fused)(context(net, batch))
            report.total.backward()
            assert set(report.paths.values()) == {"fused" if fused else "plain"}
            found.append((report.total.item(), gradients(net)["base_model.model.lm_head.lora_A.default.weight"]))
        assert found[0][0] == pytest.approx(found[1][0], rel=2e-2)
        assert (found[0][1] - found[1][1]).norm() <= 5e-2 * found[1][1].norm()
        assert found[0][1].norm() > 0


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_heads_that_are_more_than_lora_hold_their_logits(settings: dict[str, Any]) -> None:
    net = on_head(**settings)
    assert Criterion()(context(net, tiny_models.batch("llama"))).paths["base"] == "plain"


def test_a_compiled_lora_head_holds_its_logits() -> None:
    torch._dynamo.reset()
    net = on_head()
    net.compile(backend="eager")
    assert Criterion()(context(net, tiny_models.batch("llama"))).paths["base"] == "plain"
