"""R4F as architectures: r4f_roberta_large is roberta_large with a classification head of spectral norm 1, and so on.

fairseq's own --spectral-norm-classification-head normalises the last matrix alone, and its checkpoints cannot be loaded
again. These can: by the same architecture, and after `fold_checkpoint` by the plain one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model, register_model_architecture
from fairseq.models.bart import BARTModel
from fairseq.models.roberta import RobertaModel

from seqreg import spectral_norm
from seqreg.errors import BadInput
from seqreg.integrations.fairseq_plugin.regularizer import answered

RAW = "parametrizations.weight.original"
ARCHITECTURES = {
    "r4f_roberta": ("roberta", "roberta_base", "roberta_large"),
    "r4f_bart": ("bart_base", "bart_large"),
}


class _R4F:
    """What the two models below have in common."""

    args: Any
    classification_heads: Any

    @staticmethod
    def add_r4f_args(parser: Any) -> None:
        parser.add_argument(
            "--r4f-layers", choices=["all", "out_proj"], default="all",
            help="weight matrices of the head to normalise: all (the paper), or the last (fairseq)",
        )  # fmt: skip
        parser.add_argument("--r4f-warmup", type=int, default=15, help="power iterations before the first pass")

    def register_classification_head(self, name: str, *values: Any, **named: Any) -> None:
        with answered():
            if getattr(self.args, "spectral_norm_classification_head", False):
                raise BadInput(
                    "--spectral-norm-classification-head: the head of an r4f architecture is normalised already"
                )
        super().register_classification_head(name, *values, **named)  # type: ignore[misc]
        layers: spectral_norm.Layers = getattr(self.args, "r4f_layers", "all")
        spectral_norm.spectral_norm(self.classification_heads[name], layers, getattr(self.args, "r4f_warmup", 15))

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Load checkpoints of this model and of plain ones; fairseq's code looks for plain weights to learn sizes."""
        prefix = f"{name}." if name else ""
        start = f"{prefix}classification_heads."
        known = set(state_dict)
        for key in [key for key in state_dict if key.startswith(start) and key.endswith(RAW)]:
            state_dict[key.replace(RAW, "weight")] = state_dict[key]
        super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        for key in self.classification_heads.state_dict():
            plain = f"{start}{key.replace(RAW, 'weight')}"
            if key.endswith(RAW) and plain in state_dict:
                weight = state_dict[f"{start}{key}"] = state_dict.pop(plain)
                u, v = (f"{start}{key.replace('original', f'0.{part}')}" for part in "uv")
                if u not in known:  # those that fairseq put there are of the weights that are replaced
                    norm = spectral_norm.SpectralNorm(weight, getattr(self.args, "r4f_warmup", 15))
                    state_dict[u], state_dict[v] = norm.u, norm.v


@register_model("r4f_roberta")
class R4FRoberta(_R4F, RobertaModel):
    """RoBERTa with a normalised classification head."""

    @staticmethod
    def add_args(parser: Any) -> None:
        RobertaModel.add_args(parser)
        _R4F.add_r4f_args(parser)


@register_model("r4f_bart")
class R4FBART(_R4F, BARTModel):
    """BART with a normalised classification head."""

    @staticmethod
    def add_args(parser: Any) -> None:
        BARTModel.add_args(parser)
        _R4F.add_r4f_args(parser)


for _model, _names in ARCHITECTURES.items():
    for _name in _names:
        register_model_architecture(_model, f"r4f_{_name}")(ARCH_CONFIG_REGISTRY[_name])


def fold_checkpoint(source: Path | str, target: Path | str) -> None:
    """Write a checkpoint of an r4f architecture as one of the plain model: it loads without seqreg, to predict with.

    Args:
        source: a checkpoint that you trust: fairseq's are pickles
    """
    state = torch.load(source, map_location="cpu", weights_only=False)
    model, kind = state["model"], state["cfg"]["model"]
    raw = [key for key in model if key.endswith(RAW)]
    if not raw:
        raise BadInput(f"{source}: not a checkpoint of an r4f architecture")
    for key in raw:
        u, v = (model.pop(key.replace("original", f"0.{part}")) for part in "uv")
        weight = model.pop(key)
        model[key.replace(RAW, "weight")] = weight / torch.dot(u, weight @ v)
    _rename(kind, "arch")
    _rename(kind, "_name")
    criterion = state["cfg"]["criterion"]
    if criterion["_name"] == "seqreg_sentence_prediction":  # without terms it is fairseq's, which has fewer settings
        own = ("seqreg_terms", "distributed_world_size")
        kept = {key: value for key, value in criterion.items() if key not in own}
        state["cfg"]["criterion"] = {**kept, "_name": "sentence_prediction"}
    torch.save({**state, "criterion": None, "last_optimizer_state": None}, target)


def _rename(settings: Any, key: str) -> None:
    """r4f_roberta_large becomes roberta_large; settings are a namespace or a mapping."""
    values = settings if isinstance(settings, dict) else vars(settings)
    if str(values.get(key, "")).startswith("r4f_"):
        values[key] = values[key].removeprefix("r4f_")
