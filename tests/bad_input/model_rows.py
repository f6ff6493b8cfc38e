"""Models, tokenizers and generation settings that do not go together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from seqreg import Criterion
from seqreg.errors import BadInput
from seqreg.integrations.hf import context
from seqreg.terms.r3f import R3F
from seqreg.workbench.data import hardware
from seqreg.workbench.data.tokenizers import train_tokenizer
from tests.bad_input.table import refused, row, run, tiny
from tests.helpers import tiny_models

SIZE = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def saved(folder: Path, **settings: Any) -> list[str]:
    """A tiny pretrained BART with its tokenizer, and the settings that choose it."""
    tokenizer = train_tokenizer(["a few words of text"] * 3, 320)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    own = transformers.BartConfig(**{"vocab_size": len(tokenizer), **ids, **SIZE, **settings})
    transformers.BartForConditionalGeneration(own).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [f"model.name={folder}", "model.architecture=null"]


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@row(7, "a tokenizer larger than the model", "E", "refused")
def _(tmp: Path) -> None:
    message = r"the tokenizer has \d+ tokens, but the model only 100: they do not belong together"
    refused(tmp, message, *tiny(tmp, *saved(tmp / "model", vocab_size=100)))
    batch = tiny_models.batch("bart")
    batch["input_ids"][1, 2] = tiny_models.VOCAB
    with pytest.raises(BadInput, match=r"input_ids\[1, 2\] is 48, but the model embeds 0..47"):
        context(tiny_models.make("bart"), batch)


@row(8, "the tokenizer of another model", "W", "warned", "told by special tokens; one with the same is not seen")
def _(tmp: Path) -> None:
    said = run(tmp, *tiny(tmp, *saved(tmp / "model", eos_token_id=5)))
    assert said.code == 0, said
    assert "warning: eos_token_id is 5 in the model and 2 in the tokenizer: is it another's?" in said.err


@row(10, "a source longer than the model's positions", "E", "refused", "`seqreg check` counts what is cut")
def _(tmp: Path) -> None:
    message = "data.max_source_length=24: the model has only 16 positions"
    refused(tmp, message, *tiny(tmp, "model.settings.max_position_embeddings=16"))
    said = run(tmp, *tiny(tmp, verb="check"))
    assert said.code == 0, said
    assert "100.0%" in said.out


@row(11, "a target longer than the model's positions", "E", "refused")
def _(tmp: Path) -> None:
    chosen = ["model.settings.max_position_embeddings=30", "generation.max_length=31"]
    refused(tmp, "generation.max_length=31: the model has only 30 positions", *tiny(tmp, *chosen))
    chosen[1] = "data.max_target_length=31"
    refused(tmp, "data.max_target_length=31: the model has only 30 positions", *tiny(tmp, *chosen))


@row(13, "generation settings that no save accepts", "E", "refused", "before the first step, not at the first save")
def _(tmp: Path) -> None:
    chosen = saved(tmp / "model")
    edit(tmp / "model" / "generation_config.json", temperature=0.5, do_sample=False)
    refused(tmp, r"model: its generation settings contradict each other: .*", *tiny(tmp, *chosen))
    said = run(tmp, *tiny(tmp, "generation.num_beams=1", "generation.length_penalty=2.0"))
    assert said.code == 0, said  # a penalty without beams means nothing, and is not saved


@row(15, "a tokenizer without a padding token", "E", "refused")
def _(tmp: Path) -> None:
    chosen = saved(tmp / "model")
    path = tmp / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "pad_token"}))
    message = r"no padding token, so batches cannot be made: set pad_token .* model.tokenizer=NAME"
    refused(tmp, message, *tiny(tmp, *chosen))


@row(53, "a model that cannot generate", "E", "refused")
def _(tmp: Path) -> None:
    message = "bert cannot generate texts: choose a model such as bart"
    refused(tmp, message, *tiny(tmp, "model.name=null", "model.architecture=bert"))
    transformers.BertModel(
        transformers.BertConfig(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(tmp / "bert")
    train_tokenizer(["words"], 300).save_pretrained(tmp / "bert")
    refused(tmp, message, *tiny(tmp, f"model.name={tmp / 'bert'}", "model.architecture=null"))
    for setting in ("d_model: 15", "d_model: x", "d_model: -1", "encoder_layers: 1.5", "activation_function: no"):
        message = r"model.architecture=bart cannot be built with model.settings="
        refused(tmp, message, *tiny(tmp, f"model.settings={{{setting}}}"))


@row(54, "embeddings that are not used", "E", "refused", "a term that perturbs nothing says so")
def _(tmp: Path) -> None:
    model = tiny_models.make("bart")
    model.get_encoder().embed_tokens, used = torch.nn.Embedding(48, 16), model.get_encoder().embed_tokens
    forward = model.get_encoder().forward

    def outside(input_ids: Any = None, inputs_embeds: Any = None, **further: Any) -> Any:
        return forward(inputs_embeds=used(input_ids), **further)

    model.get_encoder().forward = outside
    with pytest.raises(BadInput, match="embed"):
        Criterion(R3F(scale=0.1))(context(model, tiny_models.batch("bart"), step=0))


@row(55, "embeddings that the model multiplies", "H", "handled", "inject: scaled or word; see docs/terms/r3f.md")
def _(tmp: Path) -> None:
    sites = {
        name: context(tiny_models.make(name), tiny_models.batch(name)).forward.sites for name in ("bart", "pegasus")
    }
    assert [sites[name]["encoder"].scale for name in sites] == [1.0, 4.0]  # sqrt(16)


@row(75, "a precision that the device lacks", "E", "refused", "tried before anything else; MPS is not at hand")
def _(tmp: Path) -> None:
    message = r"optimisation.precision=fp16: this machine's cpu cannot: set optimisation.precision=fp32 or bf16"
    if not torch.accelerator.is_available():
        refused(tmp, message, *tiny(tmp, "optimisation.precision=fp16"))
    hardware.check_precision("bf16")


class Evil:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@row(73, "a malicious pickle", "E", "refused", "weights of a model; checkpoints: see docs/reliability.md")
def _(tmp: Path) -> None:
    chosen = saved(tmp / "model")
    (tmp / "model" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil(tmp / "pwned")}, tmp / "model" / "pytorch_model.bin")
    refused(tmp, r"model: no model can be loaded from this folder: ", *tiny(tmp, *chosen))
    assert not (tmp / "pwned").exists()
    (tmp / "model" / "model.safetensors").write_bytes(b"torn")
    refused(tmp, r"model: no model can be loaded from this folder: .*header", *tiny(tmp, *chosen))


@row(
    78,
    "a model that can be loaded and not trained or saved",
    "E",
    "refused",
    "quantized weights, and settings of config.json",
)
def _(tmp: Path) -> None:
    chosen = saved(tmp / "model")
    path = tmp / "model" / "config.json"
    plain = path.read_text()
    for settings, message in (
        (
            {"quantization_config": {"quant_method": "gguf"}},
            r"quantization_config.quant_method='gguf': .* choose the model",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantization_config.quant_method='gptq': quantized",
        ),
        (
            {"distributed_config": {"tp_size": 2}},
            r"distributed_config: remove it; engine.name=fsdp2 is what shards a model",
        ),
        ({"output_attentions": True}, r"`output_attentions` attribute is not supported .* set it to 'eager' instead"),
    ):
        edit(path, **settings)
        refused(tmp, rf"model: config.json: .*{message}", *tiny(tmp, *chosen))
        path.write_text(plain)
