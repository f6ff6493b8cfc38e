"""What happens between backward and the optimizer's step: selective updates.

Used around the step, in a loop of your own or by the trainers (`update=`):

    update.begin(model, steps_per_epoch=len(loader))
    with update.around(model.parameters()):
        optimizer.step()
"""

from seqreg.selective_update.base import MeasuredUpdate, Update, layer_places
from seqreg.selective_update.child_tuning import ChildTuningD, ChildTuningF
from seqreg.selective_update.selective import SelectiveUpdate
from seqreg.selective_update.stochastic import StochasticUpdate

__all__ = [
    "ChildTuningD",
    "ChildTuningF",
    "MeasuredUpdate",
    "SelectiveUpdate",
    "StochasticUpdate",
    "Update",
    "layer_places",
]
