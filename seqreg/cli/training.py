"""Commands for one model: train, launch, check, quickstart, evaluate, predict, serve, export, replay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from seqreg.cli.options import (
    Json,
    Recipe,
    Settings,
    Terms,
    Trained,
    Trust,
    TrustChanges,
    Variants,
    check_address,
    print_result,
)
from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import run_config
from seqreg.workbench.scores.results import METRICS, nothing_learned, score_table
from seqreg.workbench.text.atomic_files import ASIDE, check_file, writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console, first_process, quiet, say, warn

app = typer.Typer()


@app.command()
def train(
    recipe: Recipe,
    settings: Settings = None,
    terms: Terms = None,
    variant: Variants = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Only resume from a checkpoint: an error if there is none.")
    ] = False,
    allow_change: Annotated[
        Optional[list[str]],
        typer.Option("--allow-change", help="Resume although this setting has changed; may be repeated."),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Train a recipe, evaluate it, and write the model, its scores and its curves.

    The same command again resumes a run that was stopped, and does nothing if the run is finished.

    seqreg train quickstart --terms r3f

    seqreg train gigaword --terms r3f --variant tiny data.path=gigaword.jsonl output=runs/try

    seqreg train glue --variant rte --terms r4f terms.r3f.weight=0.7 seed=3

    seqreg train quickstart optimisation.learning_rate=1e-3 --allow-change optimisation.learning_rate
    """
    run = run_config.resolve(
        recipe, terms=terms or (), variants=variant or (), overrides=settings or (), trust=trust,
        paths=run_config.PATHS,
    )  # fmt: skip
    from seqreg.workbench.run import train

    quiet()
    output = run.config.output
    if run.machine and first_process():
        say(run.machine)
    metrics = train.train(run, overwrite=overwrite, resume=resume, allow_change=allow_change or ())
    if not metrics:  # not the first process
        return
    print_result({**metrics, "output": output}, score_table({metrics["method"]: metrics}), as_json=as_json)
    if lesson := nothing_learned(metrics):
        warn(f"seqreg: warning: {lesson}")
    if run.note:
        console.print(run.note, soft_wrap=True)
    console.print(f"Everything is in {plain(output)}")
    if run.config.logging.tensorboard:
        console.print(f"Curves: tensorboard --logdir {plain(output)}")


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(help="A command of seqreg with its arguments: `train gigaword ...`.")],
    nproc: Annotated[int, typer.Option("--nproc", min=1, max=999, help="Processes on a node.")] = 1,
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, max=9999, help="Nodes.")] = 1,
    endpoint: Annotated[
        Optional[str],
        typer.Option(
            "--rdzv-endpoint", help="HOST:PORT where the nodes meet; the same on all of them."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", min=0, max=1000,
            help="Start all processes again, so often, when one has died; they resume from the last checkpoint.",
        ),
    ] = 0,
    shutdown_timeout: Annotated[
        int, typer.Option("--shutdown-timeout", min=1, help="Seconds to save in, after a signal.")
    ] = 30,
) -> None:  # fmt: skip
    """Run a command in several processes, on one node or several, with torchrun. Options come before the command.

    On several nodes the same line is run on each; all have to see the output folder under one path.

    seqreg launch --nproc 8 train gigaword --terms r3f engine.name=fsdp2

    seqreg launch --nnodes 2 --nproc 8 --rdzv-endpoint node0:29500 --max-restarts 3 train gigaword --terms r3f
    """
    known = sorted(ctx.find_root().command.commands)  # type: ignore[attr-defined]
    if words[0] not in known:
        raise BadInput(f"{words[0]}: no command of seqreg; {nearest(words[0], known)}")
    from seqreg.workbench.run import torchrun

    code = torchrun.launch(
        words, nproc=nproc, nnodes=nnodes, endpoint=endpoint, restarts=restarts, shutdown_timeout=shutdown_timeout
    )
    raise typer.Exit(code)


@app.command()
def check(
    recipe: Recipe,
    settings: Settings = None,
    terms: Terms = None,
    variant: Variants = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Look at a recipe and its data without training: settings, lengths, what is truncated, what the terms cost.

    seqreg check gigaword --terms r3f --terms rdrop --variant tiny data.path=gigaword.jsonl
    """
    run = run_config.resolve(
        recipe, terms=terms or (), variants=variant or (), overrides=settings or (), trust=trust,
        paths=run_config.PATHS,
    )  # fmt: skip
    from seqreg.cli import check

    quiet()
    outline = check.check(run)
    if run.machine:
        say(run.machine)
    print_result(outline, outline, as_json=as_json)


@app.command()
def quickstart(
    words: Annotated[
        Optional[list[str]], typer.Argument(help="Terms, r3f by default, and `key=value` for the fine-tuning.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of all its runs.")] = Path(
        "runs/quickstart-people"
    ),
    as_json: Json = False,
) -> None:
    """Pretrain a small BART, fine-tune it without and with a term, and show what is left of the first task.

    Offline, on generated news, in two minutes. The model is pretrained once.

    seqreg quickstart

    seqreg quickstart smart optimisation.max_steps=200
    """
    from seqreg.cli import quickstart

    pretraining, fine_tuning = quickstart.plan(words or [], output)
    quiet()
    scores = quickstart.quickstart(pretraining, fine_tuning)
    print_result(scores, quickstart.score_table(scores), quickstart.CAVEAT, as_json=as_json)
    console.print(f"Curves: tensorboard --logdir {plain(output)}")


@app.command()
def evaluate(
    run: Trained,
    settings: Settings = None,
    data: Annotated[Optional[Path], typer.Option(help="Score on this file instead of the splits of the task.")] = None,
    output: Annotated[Optional[Path], typer.Option(help="Write here instead of into the run's folder.")] = None,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Score a trained model again, on its task or on a file of your own.

    Scores with other settings, of another file, or of a model whose files have changed are not those of the run: they
    are written to RUN/scores/NAME.json, or to --output; `seqreg show RUN` prints them beside those of the run.

    seqreg evaluate runs/gigaword-tiny/r3f

    seqreg evaluate runs/gigaword-tiny/r3f --data more.jsonl --output runs/more generation.num_beams=8
    """
    if output is not None:
        writable(output, "--output ")
        if output.exists() and not output.is_dir():
            raise BadInput(f"--output {output}: a file is in the way")
        if (
            output.exists()
            and not (output / METRICS).is_file()
            and any(not path.name.startswith(ASIDE) for path in output.iterdir())
        ):
            raise BadInput(f"--output {output}: the folder is not empty, and holds no scores of seqreg: choose another")
    run_config.check_trained(run)
    if data is not None:
        check_file(data)
    paths = ["data.path"] if data is None else []
    run_config.resolve(str(run / "config.yaml"), overrides=settings or (), paths=paths, build_terms=False)
    from seqreg.workbench.run.train import evaluate_run

    quiet()
    metrics = evaluate_run(
        run, file=data, output=output, overrides=tuple(settings or ()), trust=trust, trust_changes=trust_changes
    )
    if metrics:
        print_result(metrics, score_table({metrics.get("method", run.name): metrics}), as_json=as_json)


@app.command()
def predict(
    run: Trained,
    source: Annotated[
        str,
        typer.Argument(help="Text, one example per line; - for text on stdin; a JSONL, CSV, TSV or Parquet file."),
    ],
    settings: Settings = None,
    output: Annotated[str, typer.Option("--output", "-o", help="A file; - for the standard output.")] = "-",
    as_json: Annotated[bool, typer.Option("--json", help="Predictions as JSONL: one JSON object per line.")] = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Predict with a trained model; predictions are written as they come.

    seqreg predict runs/gigaword-tiny/r3f articles.txt -o headlines.txt

    seqreg predict runs/gigaword-tiny/r3f articles.jsonl -o predictions.jsonl

    echo "australian shares closed down" | seqreg predict runs/gigaword-tiny/r3f -
    """
    run_config.check_trained(run)
    if source != "-":
        check_file(source)
    run_config.load(run, settings or (), build_terms=False)
    from seqreg.cli import predict

    quiet()
    count = predict.predict(
        run, source, output, tuple(settings or ()), trust=trust, trust_changes=trust_changes, as_json=as_json
    )
    if output != "-":
        console.print(f"{count} predictions in {plain(output)}")
        print_result({"predictions": count, "output": output}, as_json=as_json)


@app.command()
def serve(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of finished runs.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8765,
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Listen where other machines can reach the models; there is no login."),
    ] = False,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Open a local page to type a source into: outputs of runs side by side, with the probability of every token.

    The page also shows the outputs under noise on the embeddings, with the tokens that it changes. It is for this
    machine alone. Ctrl-C ends it.

    seqreg serve runs/gigaword-tiny/baseline runs/gigaword-tiny/r3f
    """
    check_address(host, allow_remote)
    for run in runs:
        run_config.check_trained(run)
        run_config.load(run, build_terms=False)
    from seqreg.cli import serve
    from seqreg.studies.common.trained_model import load_all

    quiet()
    models = load_all(runs, trust=trust, trust_changes=trust_changes)
    for model in models.values():
        _ = model.model  # what is wrong with it is told before there is a page
    server = serve.PageServer(models, host, port, allow_remote=allow_remote)
    reach = "; other machines can reach it" if allow_remote else ""
    console.print(f"{', '.join(map(plain, models))}: {server.url} (Ctrl-C ends it{reach})", soft_wrap=True)
    serve.serve(server, lambda: print_result({"url": server.url, "runs": list(models)}, as_json=as_json))
    console.print("Stopped.")


@app.command()
def export(
    run: Trained,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="A new folder for the model.")] = None,
    push_to_hub: Annotated[
        Optional[str], typer.Option("--push-to-hub", help="Upload it to this repository of the hub, such as me/model.")
    ] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Of a repository that is made.")] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Upload; without it the files are listed only.")] = False,
    as_json: Json = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Copy the model of a run with its card and tokenizer, without predictions, curves and checkpoints; or upload it.

    Paths of this machine become the last of their names. An upload needs --yes; without it its files are listed.
    With evaluation.load_best_model_at_end=true that is the model of the best checkpoint.

    seqreg export runs/gigaword-tiny/r3f -o headlines

    seqreg export runs/gigaword-tiny/r3f --push-to-hub me/headlines --yes
    """
    if (output is None) == (push_to_hub is None):
        raise BadInput("seqreg export: give one of --output FOLDER and --push-to-hub NAME")
    run_config.check_trained(run)
    from seqreg.workbench.run import export

    quiet()
    if output is not None:
        names = export.export(run, output, trust_changes=trust_changes)
        said = f"{len(names)} files are in {plain(output)}: {plain(', '.join(names))}"
        print_result({"output": str(output), "files": names}, said, as_json=as_json)
        return
    repo, names = str(push_to_hub), export.exported(run, trust_changes=trust_changes)
    for name in names:
        console.print(f"{(run / name).stat().st_size:>15,} bytes  {plain(name)}", soft_wrap=True)
    place = export.push_to_hub(run, repo, private=private, trust_changes=trust_changes) if yes else repo
    said = f"{len(names)} files are in {plain(place)}" if yes else f"Nothing is sent to {plain(repo)} without --yes"
    print_result({"output": place, "files": names, "sent": yes}, said, as_json=as_json)


@app.command()
def replay(
    crash: Annotated[Path, typer.Argument(help="A folder that a run wrote: RUN/crash/step-N.")],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute a step again that was not finite, and say where the first nonfinite number came from.

    seqreg replay runs/gigaword/r3f/crash/step-12
    """
    if not os.path.isdir(crash):
        raise BadInput(f"{crash}: no such folder; a run writes one as RUN/crash/step-N")
    from seqreg.workbench.run import replay

    quiet()
    replayed = replay.replay(crash, trust=trust)
    print_result(replayed, replay.shown(replayed), as_json=as_json)
