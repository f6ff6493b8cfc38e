"""Further examples of a step: texts without labels, and labelled examples of an old task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqreg.context import Count
from seqreg.errors import BadInput
from seqreg.integrations.hf.context import ContextBuilder, count
from seqreg.losses import IGNORE

FurtherStream = Literal["replay", "unlabelled"]
_PREFIX = "seqreg_stream/"
"""What keys of a trainer's micro-batch begin with that belong to the batch of a further stream."""


@dataclass
class StreamSampler:
    """Examples of one stream for every optimizer step: epochs of permutations, the same in a run that is resumed.

    Args:
        examples: that can be counted and indexed
        ratio: examples of the stream per labelled example
        seed: of the permutations
        rank, world: ranks draw different examples
        seen: labelled examples of all ranks so far
        drawn: examples of the stream that all ranks have drawn so far
    """

    examples: Any
    ratio: float
    seed: int
    rank: int = 0
    world: int = 1
    seen: int = 0
    drawn: int = 0
    _epoch: int = -1
    _order: list[int] = field(default_factory=list)

    def draw(self, labelled: int, micro_batches: int) -> list[list[int]]:
        """The examples of this rank for one optimizer step, cut into its micro-batches.

        Args:
            labelled: examples with labels of this rank in the step
        """
        self.seen += labelled * self.world
        rows = (int(self.ratio * self.seen + 1e-9) - self.drawn) // self.world
        first = self.drawn + self.rank * rows
        self.drawn += rows * self.world
        indices = [self._index(place) for place in range(first, first + rows)]
        cuts = [rows * number // micro_batches for number in range(micro_batches + 1)]
        return [indices[begin:end] for begin, end in itertools.pairwise(cuts)]

    def _index(self, place: int) -> int:
        epoch, index = divmod(place, len(self.examples))
        if epoch != self._epoch:
            drawn = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.examples), generator=drawn).tolist()
        return self._order[index]

    def state(self) -> Tensor:
        return torch.tensor([self.seen, self.drawn])

    def load_state(self, state: Tensor) -> None:
        self.seen, self.drawn = (int(number) for number in state)


def with_stream(batch: Mapping[str, Any], name: FurtherStream, further: Mapping[str, Any]) -> dict[str, Any]:
    """A micro-batch that carries the batch of a further stream, so that both go to the device together."""
    return {**batch, **{f"{_PREFIX}{name}/{key}": value for key, value in further.items()}}


def split_streams(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[FurtherStream, dict[str, Any]]]:
    """A micro-batch without the further streams that it carries, and those by name."""
    plain: dict[str, Any] = {}
    further: dict[Any, dict[str, Any]] = {}
    for key, value in batch.items():
        if key.startswith(_PREFIX):
            name, _, inner = key.removeprefix(_PREFIX).partition("/")
            further.setdefault(name, {})[inner] = value
        else:
            plain[key] = value
    return plain, further


def count_streams(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    names: Iterable[FurtherStream] = (),
    build_context: ContextBuilder | None = None,
) -> Count:
    """What an optimizer step averages over whose micro-batches carry further streams.

    Args:
        names: streams that the step has on some rank, also where no micro-batch of this one carries them
    """
    pairs = [split_streams(batch) for batch in batches]
    names = dict.fromkeys([*names, *(name for _, further in pairs for name in further)])
    drawn: Any = {name: [further[name] for _, further in pairs if name in further] for name in names}
    return count(model, [plain for plain, _ in pairs], build_context=build_context, **drawn)


def replay_ratio(share: float) -> float:
    """Old examples per new one, where old ones are this share of all labelled examples."""
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share < 1:
        raise BadInput(f"replay_share={share!r}: expected a number in (0, 1), such as 0.05")
    return share / (1 - share)


def endless(batches: Iterable[Mapping[str, Any]], stream: str) -> Iterator[Mapping[str, Any]]:
    """The batches of a loader, again from its start when it ends."""
    while True:
        found = False
        for batch in batches:
            found = True
            yield batch
        if not found:
            raise BadInput(f"{stream}: the loader gives no batch: expected one that can be gone through again")


def written_targets(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    *,
    progress: Callable[[int], object] | None = None,
    **generation: Any,
) -> list[list[int]]:
    """Write the model's output for every text: targets for the decoder, and for divergences, never labels of a loss.

    Greedy by default. To be called with the model that training starts from, before it is trained.

    Args:
        batches: what the model takes, without labels, on its device
        progress: called with the number of texts after every batch
        generation: arguments of `model.generate`
    """
    start, pad, end = (model.generation_config.to_dict().get(name) for name in (
        "decoder_start_token_id", "pad_token_id", "eos_token_id"))  # fmt: skip
    ends = set(end) if isinstance(end, Sequence) else {end}
    was_training, written = model.training, list[list[int]]()
    model.eval()
    try:
        for batch in batches:
            inputs = {key: value for key, value in batch.items() if key != "labels" and not key.startswith("decoder_")}
            with torch.no_grad():
                rows = model.generate(**inputs, **{"num_beams": 1, "do_sample": False, **generation})
            written += [_without_padding(row, start, pad, ends) for row in rows.tolist()]
            if progress is not None:
                progress(len(rows))
    finally:
        model.train(was_training)
    return written


def _without_padding(row: list[int], start: int | None, pad: int | None, ends: set[int | None]) -> list[int]:
    """The tokens that a decoder wrote, up to its first end, without the token that it starts from."""
    tokens = row[1:] if row and row[0] == start else row
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens


def padded_labels(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> Tensor:
    """Targets of several lengths as one tensor, filled up with -100."""
    made = [torch.tensor(list(row), dtype=torch.long, device=device) for row in rows]
    return nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=IGNORE)
