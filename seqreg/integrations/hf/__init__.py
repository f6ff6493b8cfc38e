"""Hugging Face transformers: a criterion for any trainer, and a context for raw loops and Accelerate."""

from seqreg.errors import require

require("hf", "transformers", "accelerate", "safetensors")

from seqreg.integrations.hf.attach import attach, regularized
from seqreg.integrations.hf.context import HFForward, context, count
from seqreg.integrations.hf.model import r4f
from seqreg.integrations.hf.optimizer_steps import optimizer_steps
from seqreg.integrations.hf.sharding import shard
from seqreg.integrations.hf.streams import written_targets
from seqreg.integrations.hf.trainer import RegularizedSeq2SeqTrainer, RegularizedTrainer

__all__ = [
    "HFForward",
    "RegularizedSeq2SeqTrainer",
    "RegularizedTrainer",
    "attach",
    "context",
    "count",
    "optimizer_steps",
    "r4f",
    "regularized",
    "shard",
    "written_targets",
]
