"""Models and tokenizers: pretrained by name, or from scratch of any architecture."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError
from transformers.models.auto import modeling_auto as auto_models

from seqreg.engines.shards import full
from seqreg.errors import BadInput, nearest
from seqreg.integrations.hf import r4f
from seqreg.integrations.hf.model import special, unwrap
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.settings import LAYERS, Config, Model
from seqreg.workbench.data import adapters, weights
from seqreg.workbench.data.completions import USER, ChatEncoder, PromptEncoder, is_causal
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.hardware import prepare_cpu
from seqreg.workbench.data.symbols import symbol_tokenizers
from seqreg.workbench.data.tokenizers import TARGET, TwoTokenizers, train_tokenizer

PROMPT = 64
"""Positions of a causal model from scratch for its prompt, beside those of source and target."""
DEQUANTIZED = ("fp8", "mxfp4", "mxfp8")
"""Methods of quantization whose weights transformers can turn into floating-point ones as it loads them."""
_STARTS_WITH_EOS = ("bart", "mbart", "led")
_drawn: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()


def drawn_anew(model: Any) -> frozenset[str]:
    """Names of the parameters of a pretrained model that are not pretrained: of a new head, and the pooler below it."""
    return _drawn.get(unwrap(model), frozenset())


def pretrained_digest(model: Any, config: Config) -> str:
    """SHA-256 of the weights of a starting model that were pretrained, with names and shapes; "" for one from scratch.

    It is the same for all seeds: a head that is drawn, or normalised, does not count.
    """
    if config.model.name is None:
        return ""
    digest, new = hashlib.sha256(), drawn_anew(model)
    for name, parameter in sorted(adapters.plain_parameters(model).items()):
        if name not in new and ".parametrizations." not in name:
            values = full(parameter.detach()).cpu().contiguous().flatten()
            digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_tokenizer(config: Config, examples: Sequence[Example] = (), *, trust: bool = False) -> Any:
    """The tokenizer of a run, or both of them; `examples` are for one that has to be made of training text."""
    return tokenizer_of(config.model, examples, trust=trust)


def tokenizer_of(
    chosen: Model, examples: Sequence[Example] = (), *, trust: bool = False, option: str = "model.tokenizer=NAME"
) -> Any:
    """The same without a run.

    Args:
        option: how a user chooses another tokenizer
    """
    if chosen.has_symbols:
        settings = fetched(transformers.AutoConfig, chosen.name, "model", trust) if chosen.name else None
        return symbol_tokenizers(chosen, settings, examples)
    name = chosen.tokenizer or chosen.name
    if name is None:
        texts = (text for row in examples for text in (row.source, row.second, row.target) if text)
        return train_tokenizer(texts, chosen.vocab_size)
    beside = os.path.join(chosen.name or "", TARGET)
    target = chosen.target_tokenizer or (beside if chosen.name and os.path.isdir(beside) else None)
    source = stored_tokenizer(name, trust, f"set {option}")
    return source if target is None else _two(source, stored_tokenizer(target, trust), target)


def _two(source: Any, target: Any, name: str) -> TwoTokenizers:
    """Both tokenizers, if one model can have both."""
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(source, key), getattr(target, key)
        if ids[0] != ids[1]:
            raise BadInput(
                f"model.target_tokenizer={name}: its {key} is {ids[1]}, and {ids[0]} in the tokenizer of sources"
            )
    return TwoTokenizers(source, target)


def stored_tokenizer(name: str, trust: bool, fix: str = "save one there with save_pretrained") -> Any:
    """The tokenizer of a folder or of the hub. Where there is none, transformers makes one without a vocabulary."""
    tokenizer = fetched(transformers.AutoTokenizer, name, "tokenizer", trust)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise BadInput(f"{name}: there is no tokenizer: its vocabulary is empty; {fix}")
    return tokenizer


def load_model(config: Config, card: Card, tokenizer: Any, *, trust: bool = False, trained: bool = False) -> Any:
    """The model of a run, in float32, with its head and the generation settings of the recipe.

    Args:
        trust: run the code that a model brings along; only a person at the command line can say so
        trained: it was trained for this task, so its head is stored too, and is never drawn anew
    """
    generates = card.kind == "generation"
    labels = {} if generates else _labels(card)
    if config.model.name is None:
        model = _from_scratch(config, card, tokenizer, labels)
    else:
        settings = fetched(transformers.AutoConfig, config.model.name, "model", trust, **labels)
        _check_known(config, settings)
        _check_kind(settings.model_type, config.model.name, card, trust)
        settings.update(config.model.settings)
        auto = _auto(card, settings.is_encoder_decoder)
        if config.model.new_head and not generates:
            model = _with_new_head(auto, config.model.name, trust, settings)
        else:
            model = loaded(auto, config.model.name, trust, settings, new_head=not trained and not generates)
    if generates and is_causal(model):
        _prepare_causal(model, tokenizer, config, card)
    if card.kind == "token_classification" and (isinstance(tokenizer, TwoTokenizers) or not tokenizer.is_fast):
        where = config.model.tokenizer or config.model.name
        raise BadInput(f"{where}: the tokenizer does not say where tokens are in a text: choose one fast tokenizer")
    _check_fit(model, tokenizer, config, generates)
    _check_tokens(model, tokenizer)
    if generates:
        set_generation(model, config)
    _check_runs(model, tokenizer, config, generates)
    return r4f(model, config.model.head_layers, config.model.head_warmup) if config.model.head == "r4f" else model


def _auto(card: Card, has_encoder: bool) -> Any:
    """The class of transformers that loads a model for its task."""
    if card.kind == "token_classification":
        return transformers.AutoModelForTokenClassification
    if card.kind != "generation":
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM


def _prepare_causal(model: Any, tokenizer: Any, config: Config, card: Card) -> None:
    """Refuse what a causal model cannot have; give it, and its tokenizer, the tokens that batches and ends need.

    A tokenizer without a padding token pads with its eos token: padding is told by its place, never by its id.
    """
    where, end = config.model.name or f"model.architecture={config.model.architecture}", tokenizer.eos_token_id
    if isinstance(tokenizer, TwoTokenizers):
        raise BadInput(f"{where}: a causal language model has one tokenizer: leave model.target_tokenizer out")
    if end is None:
        raise BadInput(f"{where}: the tokenizer has no eos token, which ends what is generated: set it in its files")
    if not tokenizer.is_fast:
        raise BadInput(f"{where}: the tokenizer does not say where tokens are in a text: choose a fast one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    target = model.generation_config
    target.pad_token_id = tokenizer.pad_token_id
    known = target.eos_token_id if isinstance(target.eos_token_id, list) else [target.eos_token_id]
    missing = {end, *_end_of_answers(tokenizer, config, card)}.difference(known)
    if missing:
        target.eos_token_id = [*sorted(missing), *(other for other in known if other is not None)]
    limit, template = positions(model), config.data.prompt or card.prompt
    if limit is None or template is None:
        return
    data, written = config.data, max(config.data.max_target_length, config.generation.max_length)
    around = PromptEncoder(tokenizer, template, None, written).overhead
    if data.chat_template:
        chats = ChatEncoder(tokenizer, None, written)
        around = len(chats.prompt(chats.asked(template, "a")))
    if data.max_source_length + around + written > limit:
        raise BadInput(
            f"data.max_source_length={data.max_source_length}: with {around} tokens of the prompt and {written} of the "
            f"target that is more than the {limit} positions of the model: set it to {limit - around - written} or less"
        )


def _end_of_answers(tokenizer: Any, config: Config, card: Card) -> list[int]:
    """The token that ends an answer in a chat, where the run may have chats: it need not be the eos token."""
    if tokenizer.chat_template is None or not (config.data.chat_template or card.columns.messages):
        return []
    try:
        ids, _ = ChatEncoder(tokenizer, None, sys.maxsize).completion([(USER, "a")], "a")
    except BadInput:  # which a chat of the data meets too, if there is one
        return []
    return ids[-1:]


def _check_runs(model: Any, tokenizer: Any, config: Config, generates: bool) -> None:
    """Refuse settings of a model that fail when it is used, such as those of its generation: here, on a short text."""
    ids = torch.tensor([tokenizer("a")["input_ids"] or [0]])
    training, given = model.training, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
            warnings.simplefilter("ignore")  # of the few tokens
            model.eval()
            if generates and is_causal(model):
                model.generate(**given, max_new_tokens=2, min_new_tokens=0)
            elif generates:
                model.generate(**given, max_length=min(4, config.generation.max_length), min_length=0)
            else:
                model(**given)
    except Exception as error:  # of whatever the settings broke inside the model
        where = config.model.name or f"model.settings={config.model.settings}"
        task, files = (
            ("generate", "config.json and generation_config.json") if generates else ("classify", "config.json")
        )
        look = f": look at its {files}" if config.model.name else ""
        raise BadInput(f"{where}: {type(model).__name__} cannot {task}: {_reason(error)}{look}") from None
    finally:
        model.train(training)


def _with_new_head(auto: Any, name: str, trust: bool, config: Any) -> Any:
    """The body of a model under a head that is drawn anew, also where the model has a head of the same size."""
    source = loaded(auto, name, trust, fetched(transformers.AutoConfig, name, "model", trust), new_head=True)
    model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    if model.base_model is model:
        raise BadInput(f"model.new_head: {type(model).__name__} does not tell its head from its body")
    model.base_model.load_state_dict(source.base_model.state_dict())
    above = {key for key, _ in model.named_parameters() if not weights.in_body(model, key)}
    _drawn[model] = drawn_anew(source) | above
    return model


def loaded(auto: Any, name: str, trust: bool, config: Any, *, new_head: bool) -> Any:
    """A model with the weights that are stored: all of them, but for a head that is drawn anew if `new_head`."""
    _check_layers(name, config)
    if not trust:
        _check_attention(name, config)
    _check_stored(name, config)
    _check_generation(name)
    settings: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    prepare_cpu()
    model, report = fetched(auto, name, "model", trust, config=config, **settings)
    _check_saves(name, model)
    _drawn[model] = frozenset(weights.check_loaded(model, report, name, new_head=new_head))
    if bad := weights.not_finite(model):
        raise BadInput(f"{name}: {bad}: the file of weights is spoilt")
    return model


def _check_layers(name: str, config: Any) -> None:
    """Refuse more layers than model.settings may have: they would be built one by one, for hours."""
    for key, value in config.to_dict().items():
        if "layer" in key and isinstance(value, int) and value > LAYERS:
            raise BadInput(f"{name}: config.json: {key}={value:,}: expected at most {LAYERS:,}")


def _check_stored(name: str, config: Any) -> None:
    """Refuse what transformers loads, and neither trains nor saves: quantized weights, a plan for several devices."""
    method = dict(getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method is not None and method not in DEQUANTIZED:
        _refuse_quantized(name, method)
    if method is None and (whole := weights.whole_numbers(name)):
        raise BadInput(
            f"{name}: {whole}, and config.json has no quantization_config: quantized weights are not trained here: "
            "choose the model that they were made from"
        )
    if getattr(config, "distributed_config", None) is not None:
        raise BadInput(f"{name}: config.json: distributed_config: remove it; engine.name=fsdp2 is what shards a model")


def _refuse_quantized(name: str, method: Any) -> NoReturn:
    raise BadInput(
        f"{name}: config.json: quantization_config.quant_method={str(method)!r}: quantized weights are not trained "
        "here: choose the model that they were made from"
    )


def _check_saves(name: str, model: Any) -> None:
    """Refuse a model that the trainer, or the first save, would refuse."""
    if getattr(model, "is_quantized", False):
        _refuse_quantized(name, model.config.quantization_config.quant_method)
    try:
        model.config.validate()
    except Exception as error:  # of the library that checks configurations
        raise BadInput(f"{name}: config.json: {_reason(error)}") from None


def _check_attention(name: str, config: Any) -> None:
    """Refuse an attention, or experts, that are a repository of the hub: transformers would run its code."""
    for key in ("_attn_implementation", "_experts_implementation"):
        wanted = getattr(config, key, None)
        if isinstance(wanted, str) and "/" in wanted:
            raise BadInput(
                f"{name}: config.json asks for {key.strip('_')}={wanted!r}, which is code from the hub: set it to "
                "'eager' or 'sdpa', or if you trust that code give --trust-remote-code"
            )
    for part in getattr(config, "sub_configs", {}):
        _check_attention(name, getattr(config, part, None))


def _check_generation(name: str) -> None:
    """Refuse a generation_config.json that cannot be read: transformers would ignore it."""
    if os.path.isfile(os.path.join(name, transformers.utils.GENERATION_CONFIG_NAME)):
        fetched(transformers.GenerationConfig, name, transformers.utils.GENERATION_CONFIG_NAME, False)


def _labels(card: Card) -> dict[str, Any]:
    names = card.labels or ["score"]
    ids = {name: index for index, name in enumerate(names)}
    about = {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": ids}
    if card.kind == "token_classification":
        return about
    return {**about, "problem_type": "single_label_classification" if card.labels else "regression"}


def _from_scratch(config: Config, card: Card, tokenizer: Any, labels: Mapping[str, Any]) -> Any:
    name = config.model.architecture or ""
    if name not in transformers.CONFIG_MAPPING:
        raise BadInput(f"model.architecture={name!r}: unknown; {nearest(name, transformers.CONFIG_MAPPING.keys())}")
    _check_kind(name, f"model.architecture={name}", card)
    try:
        auto = _auto(card, name in auto_models.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
        prepare_cpu()
        model = auto.from_config(_fresh_config(config, tokenizer, labels))
        if card.kind == "generation":
            _forbid_special(model, tokenizer)
        return model
    except BadInput:
        raise
    except Exception as error:  # configurations and models of any architecture: of any kind, and all mean the same
        raise BadInput(
            f"model.architecture={name} cannot be built with model.settings={config.model.settings}: {_reason(error)}"
        ) from None


def _forbid_special(model: Any, tokenizer: Any) -> None:
    """Generate what targets look like: `<s>` first where they begin with it, then no token that is no text."""
    if not is_causal(model) and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        model.generation_config.forced_bos_token_id = tokenizer.bos_token_id
    never = {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.unk_token_id}
    never -= {None, tokenizer.eos_token_id}
    model.generation_config.bad_words_ids = [[token] for token in sorted(never)] or None


def is_decoder(kind: str) -> bool:
    """Whether models of a type of transformers are decoders alone, and not encoders that can be made one."""
    others = auto_models.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto_models.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return kind in auto_models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not any(kind in names for names in others)


def _check_kind(kind: str, where: str, card: Card, trust: bool = False) -> None:
    """Refuse a model that cannot do the task, in fewer words than transformers."""
    generates = card.kind == "generation"
    if card.kind == "token_classification":
        if kind not in auto_models.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES and not trust:
            raise BadInput(
                f"{where}: {kind} cannot classify tokens: choose a model such as roberta, bert or deberta-v2"
            )
        return
    has_encoder = kind in auto_models.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if generates and not has_encoder and not is_decoder(kind) and not trust:
        raise BadInput(f"{where}: {kind} cannot generate texts: choose a model such as bart, pegasus, t5 or llama")
    if not generates and kind not in auto_models.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and not trust:
        raise BadInput(f"{where}: {kind} cannot classify texts: choose a model such as roberta, bert or bart")


def _check_tokens(model: Any, tokenizer: Any) -> None:
    """Warn of a tokenizer that is probably another model's: their special tokens are not the same."""
    names = ("bos_token_id", "eos_token_id") if is_causal(model) else ("pad_token_id", "bos_token_id", "eos_token_id")
    for name in names:
        id_, other = special(model, name), getattr(tokenizer, name)
        if id_ is not None and other is not None and id_ != other:
            warnings.warn(f"{name} is {id_} in the model and {other} in the tokenizer: is it another's?", stacklevel=3)


def _fresh_config(config: Config, tokenizer: Any, labels: Mapping[str, Any]) -> Any:
    """A configuration from scratch, which fits the tokenizer and the lengths."""
    name = config.model.architecture or ""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    lengths = (config.data.max_source_length, config.data.max_target_length, config.generation.max_length)
    has_encoder = name in auto_models.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    longest = max(lengths) + 8 if labels or has_encoder else sum(lengths) + PROMPT
    starts = {} if not (labels or has_encoder) else {"decoder_start_token_id": eos if name in _STARTS_WITH_EOS else pad}
    settings = {
        "vocab_size": len(tokenizer), "pad_token_id": pad, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos,
        "max_position_embeddings": longest, **starts, **labels, **config.model.settings,
    }  # fmt: skip
    if name in _STARTS_WITH_EOS:
        settings.setdefault("forced_eos_token_id", eos)
    _check_known(config, transformers.CONFIG_MAPPING[name]())
    return transformers.AutoConfig.for_model(name, **settings)


def _check_known(config: Config, known: Any) -> None:
    for key in config.model.settings:
        if not hasattr(known, key):
            options = [name for name in vars(known) if not name.startswith("_")]
            raise BadInput(f"model.settings.{key}: {known.model_type} has no such setting; {nearest(key, options)}")


def set_generation(model: Any, config: Config) -> None:
    """Make the recipe's generation settings the model's own, so that they are saved with it."""
    chosen, target = config.generation, model.generation_config
    if is_causal(model):  # whose lengths count the prompt too
        target.max_length, target.min_length = None, None
        target.max_new_tokens, target.min_new_tokens = chosen.max_length, chosen.min_length
    else:
        target.max_length, target.min_length = chosen.max_length, chosen.min_length
        target.max_new_tokens = None
    target.num_beams, target.no_repeat_ngram_size = chosen.num_beams, chosen.no_repeat_ngram_size
    beams = chosen.num_beams > 1  # without them the other two mean nothing, and transformers refuses to save them
    target.length_penalty = chosen.length_penalty if beams else 1.0
    target.early_stopping = chosen.early_stopping if beams else False
    for key in ("temperature", "top_k", "top_p") if chosen.do_sample or target.do_sample else ():
        setattr(target, key, getattr(chosen, key) if chosen.do_sample else None)  # alone they mean nothing either
    target.do_sample = chosen.do_sample
    if chosen.suppress_tokens:
        size = int(model.get_input_embeddings().weight.shape[0])
        if max(chosen.suppress_tokens) >= size:
            raise BadInput(f"generation.suppress_tokens={chosen.suppress_tokens}: the model has tokens 0 to {size - 1}")
        target.suppress_tokens = chosen.suppress_tokens
    try:
        target.validate(strict=True)
    except ValueError as error:  # it would be refused by the first save
        where = config.model.name or "model"
        raise BadInput(f"{where}: its generation settings contradict each other: {_reason(error)}") from None


def _check_fit(model: Any, tokenizer: Any, config: Config, generates: bool) -> None:
    """Refuse a tokenizer or lengths that are too large for the model, before they become an index error."""
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise BadInput(
            f"the tokenizer has {len(tokenizer)} tokens, but the model only {size}: they do not belong together"
        )
    if tokenizer.pad_token_id is None:
        raise BadInput(
            "the tokenizer has no padding token, so batches cannot be made: set pad_token in its "
            "tokenizer_config.json, or choose another with model.tokenizer=NAME"
        )
    limit, lengths = positions(model), {"data.max_source_length": config.data.max_source_length}
    if generates:
        lengths["data.max_target_length"] = config.data.max_target_length
        lengths["generation.max_length"] = config.generation.max_length
    for key, length in lengths.items():
        if limit is not None and length > limit:
            raise BadInput(f"{key}={length}: the model has only {limit} positions: set {key} to that or less")


def positions(model: Any) -> int | None:
    """The longest text that a model has places for; None where there is no bound."""
    offset = model.config.pad_token_id + 1 if model.config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    size = getattr(model.config, "max_position_embeddings", None)
    return None if size is None else int(size) - offset


def fetched(auto: Any, name: str, what: str, trust: bool, **settings: Any) -> Any:
    """`from_pretrained`, with one line when it cannot be had. Code of model repositories runs only if trusted."""
    folder = os.path.isdir(name)
    if not folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):  # on the hub there is one at most
        raise BadInput(f"{name}: no such folder, for the {what}; relative paths count from {os.getcwd()}")
    local = not folder and not _reachable(name)
    try:
        return auto.from_pretrained(name, trust_remote_code=trust, local_files_only=local, **settings)
    except Exception as error:  # every library of the hub has its own kinds; the answer to all is the same
        if "trust_remote_code" in str(error) and not trust:
            raise BadInput(
                f"{name}: this {what} brings its own code, which would run with your rights: read it, and if you trust "
                "it give --trust-remote-code"
            ) from None
        if folder:
            raise BadInput(f"{name}: no {what} can be loaded from this folder: {_reason(error)}") from None
        offline = " (HF_HUB_OFFLINE=1 is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise BadInput(
            f"the {what} {name} is not on this machine and cannot be downloaded{offline}: run `hf download {name}` "
            "where there is a network, or set model.name=FOLDER"
        ) from None


@functools.lru_cache(maxsize=8)
def _reachable(name: str) -> bool:
    """Whether the hub answers at all: asked once, without the half minute of retries of every single file."""
    try:
        huggingface_hub.model_info(name, timeout=10)
    except HfHubHTTPError:  # an answer, if not the one hoped for: the download will tell
        return True
    except Exception:  # of whatever HTTP client the hub's library has
        return False
    return True


def _reason(error: Exception) -> str:
    """The first line of an error that says something, and the next one where it ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return first[:250] or type(error).__name__
