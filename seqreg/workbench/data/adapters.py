"""LoRA adapters of PEFT: put on a model, and taken into its weights."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

from seqreg.errors import BadInput, nearest
from seqreg.integrations.hf.model import task_of, unwrap
from seqreg.integrations.hf.reference import adapted
from seqreg.workbench.config.settings import Lora
from seqreg.workbench.data import weights

FOLDER = "adapter"
"""The adapters of a finished run, inside its folder, as PEFT writes them."""
_TASKS = {"seq2seq": "SEQ_2_SEQ_LM", "causal": "CAUSAL_LM"}  # a classifier's would also train heads by their names
_WRAPPED = (".base_layer.", ".original_module.")


def with_adapters(model: Any, lora: Lora, drawn: frozenset[str]) -> Any:
    """The model with LoRA adapters, which alone are trained, beside `modules_to_save` and what is not pretrained.

    Args:
        drawn: names of parameters that were drawn anew, those of a new head
    """
    try:
        import peft
    except ImportError:
        raise BadInput("model.lora needs PEFT, which is not installed: pip install 'seqreg[lora]'") from None
    heads = {name.partition(".")[0] if not weights.in_body(model, name) else name.split(".")[-3] for name in drawn}
    settings = lora.model_dump(exclude={"modules_to_save"})
    config = peft.LoraConfig(
        **settings,
        task_type=_TASKS.get(task_of(model)),
        modules_to_save=sorted({*lora.modules_to_save, *heads}) or None,
        fan_in_fan_out=model.config.model_type in ("gpt2", "imagegpt"),  # whose layers are transposed
    )
    _check_targets(model, lora)
    try:
        wrapped = peft.get_peft_model(model, config)
    except ValueError as error:  # of modules that the model does not have
        line = next(iter(str(error).splitlines()), "")[:200]
        shown = lora.model_dump(exclude_defaults=True)
        raise BadInput(f"model.lora={shown}: {type(model).__name__} cannot have these adapters: {line}") from None
    _check_saved(wrapped, lora)
    _check_tied(wrapped)
    return wrapped


def _check_targets(model: Any, lora: Lora) -> None:
    """Refuse names of `target_modules` that no module has: PEFT would ignore them beside one that is there."""
    given, names = lora.target_modules, [name for name, _ in model.named_modules()]
    if isinstance(given, str) and any(name.endswith(f".{given}") for name in names):
        raise BadInput(f"model.lora.target_modules={given!r} is a pattern of whole names: write [{given}]")
    for module in given if isinstance(given, list) else ():
        if not any(name == module or name.endswith(f".{module}") for name in names):
            matrices = [name for name, weight in model.named_parameters() if weight.dim() == 2]
            known = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices}
            raise BadInput(
                f"model.lora.target_modules: {type(model).__name__} has no module {module!r}; {nearest(module, known)}"
            )


def _check_saved(model: Any, lora: Lora) -> None:
    """Refuse names of `modules_to_save` that no module has: PEFT would ignore them."""
    names = [name for name, _ in unwrap(model).named_modules()]
    for module in lora.modules_to_save:
        if not any(name == module or name.endswith(f".{module}") for name in names):
            raise BadInput(f"model.lora.modules_to_save: {type(unwrap(model)).__name__} has no module {module!r}")


def _check_tied(model: Any) -> None:
    """Refuse adapters of a weight that other modules have too: the plain model in the end would be another one."""
    base, names = unwrap(model), defaultdict[int, list[str]](list)
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".modules_to_save." not in name:
            names[id(parameter)].append(_plain(name).removesuffix(".weight"))
    for name, module in base.named_modules():
        saved = hasattr(module, "original_module")
        if not saved and not hasattr(module, "get_delta_weight"):
            continue
        weight = getattr(module.original_module if saved else module.get_base_layer(), "weight", None)
        others = [other for other in names[id(weight)] if other != name]
        if len(others) > saved:  # a module that is saved beside one other is told apart from it
            key = "modules_to_save" if saved else "target_modules"
            raise BadInput(
                f"model.lora.{key}: {name} has the weight of {' and '.join(others)}, and the model that is saved "
                "in the end would be another one than was trained: leave it out"
            )


def plain_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters that a model had before adapters were put on it, by their names there."""
    if adapted(model) is None:
        return dict(model.named_parameters())
    found = {}
    for name, parameter in unwrap(model).named_parameters():
        if ".lora_" not in name and ".modules_to_save." not in name:
            found[_plain(name)] = parameter
    return found


def merged_state(model: Any) -> dict[str, Tensor]:
    """The parameters of a model with its adapters taken in, by the names of the plain model; nothing is changed."""
    base, state = unwrap(model), plain_parameters(model)
    for name, parameter in base.named_parameters():
        if ".modules_to_save." in name:
            outer, _, inner = name.partition(".modules_to_save.")
            state[f"{outer}.{inner.partition('.')[2]}"] = parameter
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight"):
            key = f"{_plain(f'{name}.')}weight"
            state[key] = state[key] + sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
    return {name: value.detach() for name, value in state.items()}


def _plain(name: str) -> str:
    for part in _WRAPPED:
        name = name.replace(part, ".")
    return name
