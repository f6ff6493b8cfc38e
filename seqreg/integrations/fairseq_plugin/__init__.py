"""The target of fairseq's --user-dir: every term in fairseq's own training.

    fairseq-train ... --user-dir $(seqreg fairseq-dir) --criterion seqreg --seqreg-terms terms.yaml

fairseq imports the folder under its bare name; the modules below register themselves once, whatever it is called.
"""

from seqreg.integrations.fairseq_plugin.criterions import SeqregCriterion, SeqregSentencePrediction
from seqreg.integrations.fairseq_plugin.r4f import R4FBART, R4FRoberta, fold_checkpoint

__all__ = ["R4FBART", "R4FRoberta", "SeqregCriterion", "SeqregSentencePrediction", "fold_checkpoint"]
