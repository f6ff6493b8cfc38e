"""The command `seqreg advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer
from rich.table import Table

from seqreg.cli.options import Json, Trust, print_result
from seqreg.errors import BadInput
from seqreg.workbench.config import lookup, methods, overlay, run_config, schema
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import quiet

if TYPE_CHECKING:
    from seqreg.integrations.hf.term_advice import ModelAdvice, TermAdvice
    from seqreg.term import Term

app = typer.Typer()
NEGLIGIBLE = 0.01
"""What is next to nothing beside 1."""


@app.command()
def advise(
    model: Annotated[str, typer.Argument(help="A model by its name on the hub, or its folder.")],
    data: Annotated[
        Optional[Path], typer.Option(help="A file of examples; generated news by default.", exists=True, dir_okay=False)
    ] = None,
    task: Annotated[
        str, typer.Option(help="The task card that says which columns the file has.", autocompletion=lambda: _tasks())
    ] = "text_pairs",
    terms: Annotated[
        Optional[list[str]],
        typer.Option(
            "--terms", "-t", help="Only this term, such as `r3f` or `r3f:scale=0.01`; may be repeated. All by default."
        ),
    ] = None,
    delimiter: Annotated[Optional[str], typer.Option(help=r"Between the cells of a CSV file; \t is a tab.")] = None,
    tokenizer: Annotated[
        Optional[str], typer.Option(help="Another one than the model's: a name, a folder, or vocabulary:KEY.")
    ] = None,
    target_tokenizer: Annotated[
        Optional[str], typer.Option(help="That of targets, where it is not that of sources.")
    ] = None,
    lora_dropout: Annotated[
        Optional[float], typer.Option(min=0, max=0.99, help="Put LoRA adapters of this dropout on the model.")
    ] = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the passes.")] = "fp32",
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Examples of the batch.")] = 4,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Look at a model and a batch, and say of every term what it would measure there, what it costs, and what to set.

    Nothing is trained but three plain steps on the batch, and nothing is written.

    seqreg advise HuggingFaceTB/SmolLM2-135M --lora-dropout 0.05

    seqreg advise facebook/bart-base --data pairs.jsonl -t r3f -t smart -t r3f:scale=0.1,relative=true
    """
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise BadInput(f"{model}: no such folder")
    between = None if delimiter is None else schema.one_character(delimiter, "--delimiter")
    from seqreg.integrations.hf.term_advice import advise as examine
    from seqreg.workbench.data import sample_batch
    from seqreg.workbench.data.hardware import check_precision

    quiet()
    check_precision(precision)
    tokenizers = tokenizer, target_tokenizer
    network, words, kind = sample_batch.load(model, tokenizers=tokenizers, lora_dropout=lora_dropout, trust=trust)
    chosen = _given(terms) if terms else _all(causal=kind == "causal")
    batch = sample_batch.batch(network, words, kind, batch_size, data, task, between)
    found = examine(network, batch, chosen, precision=precision)
    print_result(found, _about(found), _table(found), _notes(found), _summary(found), as_json=as_json)


def _tasks() -> list[str]:
    return lookup.names("tasks")


def _all(*, causal: bool) -> dict[str, Term]:
    """Every term with its defaults, and for a causal model with the settings that its recipe has for those."""
    from seqreg.build import build_term, term_names

    chosen = {}
    for name in term_names():
        chosen[name] = build_term(name)
        settings = run_config.term_settings(name, causal=causal)[name]
        if settings:
            chosen[_word(name, settings)] = build_term(name, settings)
    return chosen


def _given(words: list[str]) -> dict[str, Term]:
    """The terms of the command line."""
    from seqreg.build import build_term

    chosen = {}
    for word in words:
        parts = methods.parse(word).parts
        if len(parts) > 1:
            raise BadInput(f"--terms {word}: one term at a time; give --terms several times")
        settings: Any = overlay.Overlay()
        for setting in parts[0].settings:
            settings.set(setting, f"--terms {word}")
        chosen[str(parts[0])] = build_term(parts[0].recipe, settings.values)
    return chosen


def _word(name: str, settings: dict[str, Any]) -> str:
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return f"{name}:{','.join(f'{key}={value}' for key, value in shown.items())}"


def _about(found: ModelAdvice) -> str:
    dropout = ", ".join(f"{key} {rate:g}" for key, rate in found.dropout.items()) or "none"
    adapters = f", {found.trained_parameters:,} of them trained" * (found.trained_parameters < found.parameters)
    noise = 1e-5 / found.embedding_rms if found.embedding_rms else 0.0
    return (
        f"{plain(found.model)}: {found.parameters:,} parameters{adapters}; dropout: {dropout}; embedding weights have "
        f"an RMS of {found.embedding_rms:.3g}, so that noise of 1e-5 is {noise:.1e} of it; {found.precision}.\n"
        f"One batch with {found.tokens} labels, after three plain steps: base loss {found.base_loss:.4g}, "
        f"{found.seconds:.2f} CPU seconds with its gradients."
    )


def _table(found: ModelAdvice) -> Table:
    table = Table(title="every term on this model and batch")
    for name in ("term", "verdict", "value", "part / base", "passes", "seconds", "/ plain"):
        table.add_column(name, justify="left" if name in ("term", "verdict") else "right", overflow="fold")
    for term in found.terms:
        table.add_row(plain(term.term), term.verdict, *_numbers(term))
    return table


def _notes(found: ModelAdvice) -> str:
    """What there is to say about terms, and of how little the numbers are."""
    notes = [(term.term, note) for term in found.terms for note in (term.note, _sources(term)) if note]
    lines = [f"{plain(name)}: {plain(note)}" for name, note in notes]
    draws = "Every term draws its own dropout masks and noise, once: values, and the base losses beside them, vary."
    return "\n".join([*lines, draws])


def _sources(term: TermAdvice) -> str:
    """What dropout gives to a value, and what noise does."""
    if term.sources is None:
        return ""
    both, masks, noise = term.sources
    words = f"on one draw {both:.3g}; new dropout masks alone give {masks:.3g}, the noise alone gives {noise:.3g}"
    if noise < NEGLIGIBLE * masks:
        return f"{words}: the noise adds next to nothing, and what is left is a term of dropout, as rdrop is"
    return f"{words}: dropout adds next to nothing" if masks < NEGLIGIBLE * noise else words


def _numbers(term: TermAdvice) -> list[str]:
    if term.value is None or term.seconds is None:
        return [""] * 5
    share = "" if term.verdict == "changes the input" else f"{term.part_over_base:.2g}"
    value = "" if term.verdict == "changes the input" else f"{term.value:.3g}"
    return [value, share, f"{term.forwards} + {term.backwards}", f"{term.seconds:.2f}", f"{term.times_plain:.2f}x"]


def _summary(found: ModelAdvice) -> str:
    """Which terms count here, the cheapest first."""
    counting = [term for term in found.terms if term.verdict in ("counts", "changes the input", "begins at 0")]
    if not counting:
        return "No term counts here with these settings: see what each says."
    cheap = sorted(counting, key=lambda term: (term.forwards + 2 * term.backwards, term.term))
    words = " ".join(f"-t {plain(term.term)}" for term in cheap)
    return (
        f"These count here, the cheapest first: {words}. Whether one helps is another question: train the baseline and "
        "one of them over several seeds with seqreg compare."
    )
