"""Hugging Face transformers: a context for raw loops and Accelerate, and drop-in trainers."""

from seqreg.integrations.hf.context import HFForward, context, count
from seqreg.integrations.hf.model import r4f
from seqreg.integrations.hf.trainer import RegularizedSeq2SeqTrainer, RegularizedTrainer

__all__ = ["HFForward", "RegularizedSeq2SeqTrainer", "RegularizedTrainer", "context", "count", "r4f"]
