"""A `Context` from a transformers model and a batch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import EncoderDecoderModel, PreTrainedModel

from seqreg.context import Context, Count, Kind, Stream
from seqreg.engines import deepspeed, tensor_parallel
from seqreg.engines.detect import WHOLE_WEIGHTS, Engine, check_group, check_processes, world_size
from seqreg.engines.shards import kept_whole
from seqreg.errors import BadInput
from seqreg.forward import Dropout, Forward, Pass, PassRequest, Perturbation, PerturbationSite, Point
from seqreg.integrations.embedding_hook import Lookup, Stack, perturbed
from seqreg.integrations.hf import model as hf
from seqreg.integrations.hf import reference
from seqreg.integrations.hf.encoder_reuse import EncoderReuse
from seqreg.integrations.hf.facts import ModelFacts
from seqreg.integrations.hf.layer_input import LayerInput
from seqreg.integrations.hf.lazy_logits import Pending, deferred
from seqreg.integrations.hf.lora_head import LoraHead
from seqreg.losses import IGNORE, check_labels
from seqreg.overrides import training_off

ContextBuilder = Callable[..., Context]
"""What is called as `context` is, for models and losses that it does not know."""


class HFForward(Forward):
    """Runs a transformers model, wrapped or not, on the inputs of one batch (without its labels)."""

    def __init__(self, facts: ModelFacts, inputs: Mapping[str, Any], labels: Tensor | None = None) -> None:
        self.facts, self.inputs = facts, dict(inputs)
        self.wrapped = facts.wrapped
        self.model, self.module, self.task, self.stacks = facts.model, facts.module, facts.task, facts.stacks
        self.engine, self.shards, self.adapters = facts.engine, facts.shards, facts.adapted is not None
        self.documents = documents(self.inputs)
        self.packed = self.documents is not None
        if self.packed and self.task == "classification":
            raise BadInput("rows are packed, and a classifier has one label a row: give it a document a row")
        self.sites = {name: self._site(name, stack, labels) for name, stack in self.stacks.items()}
        self.targets = None if labels is None else target_positions(self.inputs, labels, self.task)
        training, checkpointing = self.module.training, facts.checkpointing
        self.drops_layers = training and hf.drops_layers(self.module)
        if self.drops_layers and self.engine not in ("", "DDP"):
            raise BadInput(
                f"{self.engine}: layerdrop skips layers that other ranks gather: set the model's layerdrop to 0"
            )
        self.ragged = self.drops_layers and _several_ranks(self.model, self.engine)
        self.reentrant = checkpointing == "reentrant"
        self.recomputes = training and bool(checkpointing)
        self.no_double_backward = facts.no_double_backward
        if facts.takes_cache:
            self.inputs.setdefault("use_cache", False)
        self.head = facts.head
        self.lora = LoraHead(self.head) if hasattr(self.head, "lora_A") else None
        self.head_owner = None if self.head is None or self.shards is None else self.shards.owner(self.head)
        self.batch_size = None if self.packed or hf.routes(self.module, self.inputs) else _batch_size(self.inputs)
        self.lookups = self._lookups(self.inputs)
        self.kept_inputs: dict[tuple[str, Point], LayerInput] = {}
        if self.task in ("causal", "tokens"):
            reference.check_no_virtual_tokens(facts.adapted)
        reusable = facts.reuses_encoder and not self.packed and not self.recomputes and not self.drops_layers
        self.reuse = EncoderReuse(self.module, self.stacks["encoder"].module) if reusable else None

    def keep_input(self, site: str, layer: int) -> None:
        if (site, layer) in self.kept_inputs:
            return
        if self.drops_layers or self.recomputes or self.engine not in WHOLE_WEIGHTS:
            fault = "layerdrop" if self.drops_layers else "gradient checkpointing" if self.recomputes else self.engine
            raise BadInput(f"layer={layer}: passes cannot begin at a layer under {fault}: leave layer out")
        layers = hf.layers(self.stacks[site])
        if layer >= len(layers):
            raise BadInput(f"layer={layer}: the {site} has {len(layers)} layers: expected 0 to {len(layers) - 1}")
        before = [self.stacks["encoder"].module] if site == "decoder" and "encoder" in self.stacks else []
        self.kept_inputs[site, layer] = LayerInput(layers[layer], [*before, *layers[:layer]], self._device)

    @contextlib.contextmanager
    def _clean_pass_of(self, step: int | None) -> Iterator[None]:
        for kept in (*self.kept_inputs.values(), *(() if self.reuse is None else (self.reuse,))):
            kept.forget()  # what is of an earlier clean pass
        self.lookups = self._lookups(self.inputs)
        with super()._clean_pass_of(step):
            yield

    def run(self, request: PassRequest) -> Pass:
        shifts, hidden, rows, masks = request.shifts, request.hidden, request.rows, request.masks
        inputs: Mapping[str, Any] = self.inputs
        if rows is not None:
            inputs = {key: value[rows] if isinstance(value, Tensor) else value for key, value in inputs.items()}
        options = {"output_hidden_states": True} if hidden else {}
        with contextlib.ExitStack() as exits:
            if torch.is_grad_enabled() and not self.observing:
                for lookup in self.lookups if rows is None else self._lookups(inputs):
                    exits.enter_context(lookup)
            at_embeddings = [shift for shift in shifts if not isinstance(shift.point, int)]
            for shift in shifts:
                if isinstance(shift.point, int):
                    at_embeddings = self._resume(exits, shift, masks or "independent", at_embeddings)
            kept_inputs = {} if masks is None or request.perturbed else self.kept_inputs
            for kept in kept_inputs.values():
                exits.enter_context(kept.keeping(masks or "shared"))
            embeds = exits.enter_context(perturbed(self.stacks, at_embeddings))
            reached = getattr(self.model, "find_unused_parameters", False)  # of DistributedDataParallel
            stopped = deferred(
                self.head, self.head_owner, copied=request.other_weights, lora=self.lora, reached=reached
            )
            exits.enter_context(stopped)
            if self.reuse is not None and masks is not None and not (hidden and shifts):
                inputs = exits.enter_context(self.reuse(inputs, masks, shifts))
            alone = self.observing and self.shards is None  # FSDP2 gathers in the forward of what it was called on
            exits.enter_context(deepspeed.autocast(self.wrapped))
            try:
                output = (self.module if alone else self.model)(**inputs, **options)
            except (KeyError, IndexError) as error:
                if layer := next((shift.point for shift in shifts if isinstance(shift.point, int)), None):
                    name = type(self.module).__name__
                    fix = "a layer of it takes more from those below than their output: leave layer out"
                    raise BadInput(f"layer={layer}: {name} cannot begin there, as {fix}") from error
                raise
        embeds.layer_inputs |= {key: kept.states(masks or "shared") for key, kept in kept_inputs.items()}
        states = _hidden_states(output, self.stacks) if hidden else {}
        aux = hf.aux_loss(self.module, output, inputs)
        causal = self.task == "causal"  # what follows the last token has no label
        if isinstance(output.logits, Pending) and output.logits.made is not None:
            output.logits = output.logits.made  # and perhaps changed
        if not isinstance(output.logits, Pending):
            logits = output.logits[:, :-1] if causal else output.logits
            return Pass(logits, embeds, states, lambda _: output, embeds.dtype, rows=rows, aux_loss=aux)
        pending: Pending = output.logits
        projection = pending.projection
        if causal:
            projection = dataclasses.replace(projection, states=projection.states[:, :-1])

        def whole(view: Pass) -> Any:
            output.logits = pending.tensor() if causal else view.logits
            return output

        return Pass(projection.logits, embeds, states, whole, embeds.dtype, projection, rows, aux)

    def _resume(
        self, exits: contextlib.ExitStack, shift: Perturbation, masks: Dropout, others: Sequence[Perturbation]
    ) -> list[Perturbation]:
        """Begin the pass at the input of a layer; returns the other perturbations, without stacks that do not run."""
        ((site, delta),) = shift.delta.items()
        exits.enter_context(self.kept_inputs[site, shift.point].resumed(masks, delta, shift.detach))
        runs = self.stacks.keys() - ({"encoder"} if site == "decoder" else set())
        return [
            dataclasses.replace(other, delta={key: value for key, value in other.delta.items() if key in runs})
            for other in others
        ]

    def _lookups(self, inputs: Mapping[str, Any]) -> list[Lookup]:
        """One lookup per stack, or one for both where the decoder's tokens are known and its table is the encoder's."""
        lookups = {name: Lookup(stack) for name, stack in self.stacks.items() if Lookup.possible(stack)}
        tokens = inputs.get("decoder_input_ids")
        if tokens is not None and {"encoder", "decoder"} <= lookups.keys():
            lookups["encoder"].also_for(lookups["decoder"], tokens)
        return list(lookups.values())

    def other_source(self) -> Pass | None:
        rows = next((len(v) for v in self.inputs.values() if isinstance(v, Tensor)), 0)
        if self.task != "seq2seq" or rows < 2:
            return None
        other = copy.copy(self)
        other.kept_inputs = {}  # those of this batch are of the rows' real sources
        other.inputs = {
            key: value if key.startswith("decoder_") or not isinstance(value, Tensor) else value.roll(1, 0)
            for key, value in self.inputs.items()
        }
        return other(dropout="off", grad=False)

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        if self.engine == "tensor parallelism":
            tensor_parallel.share_generators(self._device)
        with kept_whole(self.head_owner, "reshard_after_backward"), super().one_step():
            yield

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        with reference.without_adapters(self.facts.adapted):
            yield

    def saved_weights(self, folder: str) -> Mapping[str, Tensor]:
        return reference.saved_weights(self.module, folder)

    def head_parameters(self) -> set[str]:
        return hf.head_parameters(self.module) if self.task == "classification" else set()

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[None]:
        """Also without the autocast that Accelerate wraps around `forward`."""
        wrapped = vars(self.module).pop("forward", None)
        try:
            with super().full_precision():
                yield
        finally:
            if wrapped is not None:
                self.module.forward = wrapped

    def _site(self, name: str, stack: Stack, labels: Tensor | None) -> PerturbationSite:
        ids = self.inputs.get("decoder_input_ids" if name == "decoder" and len(self.stacks) > 1 else "input_ids")
        tokens = (ids.shape[0], ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() == 2 else None
        scale, lengths = stack.inner * stack.outer, None
        try:
            mask = self._mask(name, labels)
        except BadInput as error:  # matters to those who ask
            return PerturbationSite(scale, unknown=str(error), tokens=tokens)
        if self.documents is not None and tokens == tuple(self.documents.shape):
            lengths = _lengths(self.documents, mask)
        return PerturbationSite(scale, mask, tokens=tokens, lengths=lengths)

    def _mask(self, name: str, labels: Tensor | None) -> Tensor | None:
        """True on the real tokens of a stack's input."""
        source = self._given("attention_mask")
        if name == "encoder" or self.task == "causal":
            return source
        given = self._given("decoder_attention_mask")
        if self.task == "classification" and given is None:
            return source  # the model feeds the shifted source to its decoder, and reads it where the source ends
        if self.task == "classification" or labels is None:
            return given
        counted = labels.ne(IGNORE).flip(-1).cummax(-1).values.flip(-1)  # to the last label; the rest has no effect
        return counted if given is None else given & counted

    def _given(self, name: str) -> Tensor | None:
        """A mask of the batch, True on real tokens, if it has one."""
        mask = self.inputs.get(name)
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            what = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise BadInput(
                f"{name} is {what}, which does not tell padding from tokens: give it as [rows, tokens] to a term that "
                "perturbs embeddings"
            )
        return mask.bool()


def target_positions(inputs: Mapping[str, Any], labels: Tensor, task: hf.ModelTask) -> Tensor | None:
    """True where the model predicts a real token, or the class of a real one, with a label or without; [B, T] or [B].

    None where that cannot be told. For a causal model those are the places before every real token of a document but
    its first; for a seq2seq model all up to the last label.

    Args:
        labels: of the batch, not shifted
    """
    if task == "classification":
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    given = inputs.get("decoder_attention_mask" if task == "seq2seq" else "attention_mask")
    if given is not None and (not isinstance(given, Tensor) or given.shape != labels.shape):
        return None
    real = torch.ones_like(labels, dtype=torch.bool) if given is None else given.bool()
    if task == "seq2seq":
        return real & labels.ne(IGNORE).flip(-1).cummax(-1).values.flip(-1)
    if task != "causal":
        return real
    numbers = documents(inputs)
    inside = real[:, 1:] & real[:, :-1]
    return inside if numbers is None else inside & (numbers[:, 1:] == numbers[:, :-1])


LENGTHS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
"""Where the documents of packed rows begin and end, by the names that models take it under."""


def documents(inputs: Mapping[str, Any]) -> Tensor | None:
    """The number of the document that every token of packed rows is of, [B, S]; None where rows are not packed.

    Rows are packed where the batch says where documents end, numbers them (seq_idx), or where positions start again and
    no mask of padding is given, which is how transformers tells.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    for name in LENGTHS:
        if isinstance(ends := inputs.get(name), Tensor):
            places = torch.arange(ids.numel(), device=ids.device)
            return torch.bucketize(places, ends[1:].to(ids.device), right=True).view(ids.shape)
    numbers, positions = inputs.get("seq_idx"), inputs.get("position_ids")
    if isinstance(numbers, Tensor) and numbers.shape == ids.shape:
        return numbers
    mask = inputs.get("attention_mask")
    padded = isinstance(mask, Tensor) and mask.dim() == 2
    if isinstance(positions, Tensor) and positions.shape == ids.shape and not padded:
        starts = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
        return starts.cumsum(-1) if bool(starts.any()) else None
    return None


def _lengths(numbers: Tensor, mask: Tensor | None) -> Tensor:
    """How many real tokens the document of every token has, [B, S], from the documents' numbers in their rows."""
    row = torch.arange(len(numbers), device=numbers.device).unsqueeze(1).expand_as(numbers)
    _, index = torch.unique(torch.stack([row, numbers], -1).flatten(0, 1), dim=0, return_inverse=True)
    real = torch.ones_like(index) if mask is None else mask.flatten()
    return torch.bincount(index, weights=real.float())[index].view(numbers.shape)


def _batch_size(inputs: Mapping[str, Any]) -> int | None:
    """Rows of a batch all of whose tensors have that many; None where one has not."""
    sizes = {len(value) if value.dim() else 0 for value in inputs.values() if isinstance(value, Tensor)}
    simple = all(isinstance(value, (Tensor, bool, int, float, str, type(None))) for value in inputs.values())
    return sizes.pop() if simple and len(sizes) == 1 else None


def _hidden_states(output: Any, stacks: Mapping[str, Stack]) -> dict[str, tuple[Tensor, ...]]:
    """Outputs of the layers of every stack; what a stack starts from is left out."""
    states = {name: output.get(f"{name}_hidden_states" if len(stacks) > 1 else "hidden_states") for name in stacks}
    return {name: tuple(layers[1:]) for name, layers in states.items() if layers is not None}


def context(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    step: int | None = None,
    count: Count | None = None,
    stream: Stream = "labelled",
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Context:
    """One batch of a transformers model, ready for a criterion.

    Works for encoder-decoders, classifiers, regression heads, causal and masked language models, and for the same
    models inside DistributedDataParallel, FSDP2 or Accelerate. Terms are on when the model is in training mode.

    Args:
        batch: what the model takes, with "labels" (-100 where there is none); decoder inputs are made when absent
        step: the number of the optimizer step; schedules need it
        count: what the optimizer step averages over, from `count`; needed with gradient accumulation and several ranks
        stream: "unlabelled" for texts on which only terms count, with `on="unlabelled"` or "both"; "replay" for
            labelled examples of an old task, which the base loss counts too. For texts without labels the decoder of a
            seq2seq model needs targets: "labels" such as `written_targets` gives, or decoder_input_ids
        loss: a base loss of your own: called with logits and labels, aligned, it gives one number a label, and 0 where
            there is none; for classifiers one a row. Multi-label classification works that way
    """
    facts = ModelFacts.of(model)
    module, task = facts.module, facts.task
    if stream == "unlabelled":
        return _unlabelled(facts, batch, step, count)
    labels = labels_of(batch)
    if loss is None:
        hf.check_loss(module)
    kind = _kind(labels, module, task, own=loss is not None)
    labels = _checked(labels, batch, facts, kind)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if task == "seq2seq" and "decoder_input_ids" not in inputs and "decoder_inputs_embeds" not in inputs:
        _add_decoder_inputs(inputs, module, labels)
    if count is None and module.training and _several_ranks(model, facts.engine):
        raise BadInput("several ranks train one model: pass count=count(model, batches), or ranks weigh unequally")
    aligned = labels[:, 1:] if task == "causal" else labels
    forward = HFForward(facts, inputs, labels)
    own = None if loss is None else functools.partial(_of_labels, loss, aligned)
    return Context(
        forward, aligned, kind=kind, step=step, count=count, training=module.training, stream=stream, loss=own
    )


def _of_labels(loss: Callable[[Tensor, Tensor], Tensor], labels: Tensor, logits: Tensor) -> Tensor:
    return loss(logits, labels)


def _unlabelled(facts: ModelFacts, batch: Mapping[str, Any], step: int | None, count: Count | None) -> Context:
    """A batch of texts without labels: every real position counts, or every text for a classifier."""
    module, task = facts.module, facts.task
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    mask, targets = _unlabelled_positions(module, task, batch)
    if task == "seq2seq" and "decoder_input_ids" not in inputs:
        _add_decoder_inputs(inputs, module, targets)
    kind: Kind = "classes" if task == "classification" else "tokens"
    forward = HFForward(facts, inputs, targets)
    return Context(forward, None, kind=kind, mask=mask, step=step, count=count, training=module.training)


def _unlabelled_positions(module: Any, task: hf.ModelTask, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The positions of texts without labels that count, and targets that stand for labels there, not shifted."""
    ids, written, given = (batch.get(key) for key in ("input_ids", "labels", "decoder_input_ids"))
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0:
        raise BadInput("an unlabelled batch needs input_ids, one row a sequence")
    if task == "classification":
        return torch.ones(len(ids), dtype=torch.bool, device=ids.device), torch.zeros_like(ids[:, 0])
    if task != "seq2seq":
        positions = target_positions(batch, ids, task)
        assert positions is not None  # the mask of tokens has the shape of their ids
        return positions, ids
    if isinstance(given, Tensor):
        pad = hf.special(module, "pad_token_id")
        mask = torch.ones_like(given, dtype=torch.bool) if pad is None else given.ne(pad)
        mask[:, 0] = True  # some models start with their padding token
        mask = batch["decoder_attention_mask"].bool() if "decoder_attention_mask" in batch else mask
        return mask, given.masked_fill(~mask, IGNORE)
    if not isinstance(written, Tensor):
        raise BadInput(
            "texts without labels: the decoder of this model needs targets: give 'labels' that the starting model "
            "wrote (seqreg.integrations.hf.written_targets), or decoder_input_ids"
        )
    return written != IGNORE, written


def _add_decoder_inputs(inputs: dict[str, Any], module: Any, labels: Tensor) -> None:
    """Labels shifted right, as inputs of the decoder."""
    inputs["decoder_input_ids"] = hf.decoder_inputs(module, labels)
    if isinstance(module, EncoderDecoderModel):  # which does not let its decoder see padding
        seen = inputs["decoder_input_ids"] != module.config.pad_token_id
        inputs.setdefault("decoder_attention_mask", seen.long())


def _checked(labels: Tensor, batch: Mapping[str, Any], facts: ModelFacts, kind: Kind) -> Tensor:
    """The labels of a batch, checked before anything runs."""
    model, task = facts.module, facts.task
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(ids, Tensor) and (ids.dim() != 2 or len(labels) != len(ids) or ids.numel() == 0):
        raise BadInput(f"input_ids {list(ids.shape)}, labels {list(labels.shape)}: expected as many rows, at least one")
    if isinstance(ids, Tensor):
        _check_ids(ids, facts.stacks)
    if task == "classification":
        labels = labels.reshape(len(labels)) if labels.shape == (len(labels), 1) else labels
        if kind == "classes" and labels.dim() != 1:
            raise BadInput(f"labels {list(labels.shape)}: expected one class id a row")
    elif labels.is_floating_point() or labels.dim() != 2:
        raise BadInput(f"labels are {labels.dtype} {list(labels.shape)}: expected token ids, one row a sequence")
    elif task != "seq2seq" and isinstance(ids, Tensor) and labels.shape != ids.shape:
        raise BadInput(f"labels {list(labels.shape)} must align with input_ids {list(ids.shape)}: do not shift them")
    if kind != "regression":
        labels = labels.long()
        size = hf.classes_of(model, task)
        fix = "classes count from 0; is num_labels right?" if task == "classification" else "is the tokenizer larger?"
        check_labels(labels, size, fix)
    _warn_of_padding(labels, mask, model, task)
    return labels


def _check_ids(ids: Tensor, stacks: Mapping[str, Stack]) -> None:
    """Refuse tokens that the model has no embedding for."""
    table = next((stack.embedding for stack in stacks.values()), None)
    size = getattr(table, "num_embeddings", None)
    if size is None:
        return
    bad = (ids < 0) | (ids >= size)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        token = int(ids[tuple(where)])
        raise BadInput(f"input_ids{where} is {token}, but the model embeds 0..{size - 1}: is the tokenizer its own?")


def labels_of(batch: Any) -> Tensor:
    """The labels of a batch, or one line about what is wrong with it."""
    if not isinstance(batch, Mapping) or isinstance(batch.get("labels"), (list, tuple)):
        what = "labels is a list" if isinstance(batch, Mapping) else f"this is a {type(batch).__name__}"
        raise BadInput(f"a batch is a mapping of tensors, but {what}: set return_tensors='pt', or use a data collator")
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise BadInput(f"the batch has no tensor 'labels' (it has {', '.join(batch)}): the criterion needs them")
    return labels


def _warn_of_padding(labels: Tensor, mask: Any, model: Any, task: hf.ModelTask) -> None:
    pad = hf.special(model, "pad_token_id")
    if task == "seq2seq" and pad is not None and pad != hf.special(model, "eos_token_id") and (labels == pad).any():
        warnings.warn(f"labels contain the padding token {pad}, which will be learnt: use {IGNORE}", stacklevel=4)
    aligned = task in ("causal", "tokens") and isinstance(mask, Tensor) and mask.shape == labels.shape
    if aligned and ((mask == 0) & (labels != IGNORE)).any():
        warnings.warn(f"labels on padding will be learnt: set them to {IGNORE}", stacklevel=4)


def _kind(labels: Tensor, model: Any, task: hf.ModelTask, *, own: bool = False) -> Kind:
    """What the outputs are; those of a classifier with a loss of your own are numbers where its labels are."""
    if task != "classification":
        return "tokens"
    problem = getattr(model.config, "problem_type", None)
    if own and labels.is_floating_point():
        return "regression"
    if problem == "regression" or (problem is None and model.config.num_labels == 1):
        return "regression"
    if problem == "multi_label_classification" or labels.is_floating_point():
        raise BadInput(
            "multi-label classification needs a loss of its own, context(model, batch, loss=...): or labels must be "
            "one class id a row"
        )
    return "classes"


def count(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    accelerator: Any = None,
    *,
    unlabelled: Iterable[Mapping[str, Any]] | None = None,
    replay: Iterable[Mapping[str, Any]] | None = None,
    build_context: ContextBuilder | None = None,
) -> Count:
    """What one optimizer step averages over: the labels of all its micro-batches on all ranks.

    With it the gradient does not depend on how a batch is cut into micro-batches or ranks.

    Args:
        batches: the micro-batches of this rank up to the next optimizer step
        accelerator: your `accelerate.Accelerator`, if you use one; plain torch.distributed needs none
        unlabelled: those of texts without labels; None where no rank has any in the step
        replay: those of labelled examples of an old task; None where no rank has any in the step
        build_context: makes your contexts, if they are not those of `seqreg.integrations.hf.context`
    """
    check_group()
    if isinstance(batches, Mapping):
        raise BadInput("count takes the list of an optimizer step's batches: count(model, [batch])")
    given: dict[Stream, Iterable[Mapping[str, Any]] | None] = {
        "labelled": batches, "replay": replay, "unlabelled": unlabelled
    }  # fmt: skip
    streams = {name: list(some) for name, some in given.items() if some is not None}
    numbers = torch.stack([_summed(model, some, name, build_context) for name, some in streams.items()])  # [streams, 3]
    ranks = world_size()
    if accelerator is not None:
        check_processes(accelerator.num_processes)
    if ranks > 1:
        numbers = numbers.to(next(model.parameters()).device)
        torch.distributed.all_reduce(numbers)
    divided = deepspeed.is_deepspeed(model) or accelerator is None
    divisor = ranks * (deepspeed.accumulation_steps(model) if divided else accelerator.gradient_accumulation_steps)
    here = {
        name: Count(labels, sequences, divisor, None if math.isnan(positions) else positions)
        for name, (labels, sequences, positions) in zip(streams, numbers.tolist(), strict=True)
    }
    step, old = here["labelled"], here.get("replay")
    step = step if old is None else replace(step + old, replay=old)
    total = replace(step, unlabelled=here.get("unlabelled"))

    def contexts() -> Iterator[Context]:
        for name, some in streams.items():
            options: dict[str, Any] = {} if name == "labelled" else {"stream": name}
            for batch in some:
                yield (build_context or context)(model, batch, count=total, **options)

    return replace(total, contexts=contexts)


def _summed(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], stream: str, build_context: ContextBuilder | None
) -> Tensor:
    """Labels, sequences and positions of some batches of one stream, [3]; positions are NaN where not known."""
    if build_context in (None, context):
        module = hf.unwrap(model)
        task = hf.task_of(module)
        here = []
        for batch in batches:
            if stream == "unlabelled":
                mask, targets = _unlabelled_positions(module, task, batch)
            else:
                targets = labels_of(batch)
                mask = _label_mask(targets, module, task)
            here.append(Count.of(mask, target_positions(batch, targets, task)))
    else:  # a context runs nothing until a criterion is called with it
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        with training_off(inner.modules()):  # in which several ranks need the count that is being made
            here = [build_context(inner, batch).count for batch in batches]
    known = [(one.labels, one.sequences, math.nan if one.positions is None else one.positions) for one in here]
    return torch.tensor(known, dtype=torch.float64).reshape(-1, 3).sum(0)


def _label_mask(labels: Tensor, model: Any, task: hf.ModelTask) -> Tensor:
    if _kind(labels, model, task) == "regression":
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    return (labels[:, 1:] if task == "causal" else labels) != IGNORE


def _several_ranks(model: nn.Module, engine: Engine) -> bool:
    """Whether the gradients of several ranks become one."""
    return world_size() > 1 and (bool(engine) or not isinstance(model, PreTrainedModel))
