"""Run the studies of this repository and make their pages: `python -m research`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from research import study as studies
from research import study_file
from research.study import StudyRun
from seqreg.cli.main import run
from seqreg.cli.options import Json, Settings, print_result
from seqreg.errors import BadInput, nearest
from seqreg.studies.common.findings import Table, terminal_table
from seqreg.studies.common.seeds import read_seeds, write_seeds
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import say

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def study(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A study by name (`--list`), or the path of a YAML file.",
            autocompletion=study_file.names,
        ),
    ] = None,
    settings: Settings = None,
    models: Annotated[Path | None, typer.Option(help="The folder that stands for {models}.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder that stands for {data}.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the study; by default runs/studies/NAME.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="A size of the study: `small` by default, or `paper`.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Instead of the study's: `2`, or `3,7,11`.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this step; may be repeated.")] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add seeds, methods or primary comparisons to what is there.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the commands and the number of runs; run nothing.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="For --plan: minutes of one run on one core, as you measured them.")
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            help="Run nothing; pack the numbers of the study's folder into this .json.xz, beside steps that are in it "
            "and not in the folder."
        ),
    ] = None,
    pages: Annotated[
        Path | None, typer.Option(help="Run nothing; write all pages into this folder, from research/archives.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all studies, with their runs and hours.")] = False,
    as_json: Json = False,
) -> None:
    """Run a study: the commands behind a table or a figure, with what is tested fixed in advance.

    The same command again resumes a study that was stopped. What is fixed is in research/studies/NAME.yaml.

    python -m research --list

    python -m research noise --models FOLDER --data FOLDER --plan

    python -m research noise --models FOLDER --data FOLDER --archive research/archives/noise.json.xz

    python -m research --pages docs/results
    """
    if listed or pages is not None:
        if name is not None:
            raise BadInput(f"{name}: --{'list' if listed else 'pages'} is about all studies: leave the name out")
        _list(size or "small", as_json) if listed else _make_pages(pages, as_json)
        return
    if name is None:
        raise BadInput(f"no study: name one of {', '.join(study_file.names())}")
    chosen = study_file.read(name)
    for step in only or ():
        if step not in (known := [one.name for one in chosen.steps]):
            raise BadInput(f"--only {step}: no such step; {nearest(step, known)}")
    stem = Path(name).stem
    study_run = studies.make(
        stem, chosen, models=models, data=data, output=output or Path("runs/studies") / stem, size=size,
        seeds=None if seeds is None else read_seeds(seeds), settings=settings or [], extend=extend,
    )  # fmt: skip
    if archive is None:
        _check(study_run, only or [])
    if plan:
        _plan(study_run, only or [], minutes, as_json)
    elif archive is not None:
        _archive(study_run, archive, as_json)
    else:
        studies.run(study_run, only or [])
        say(f"Everything is in {study_run.output}; --archive FILE packs its numbers")
        print_result({"output": str(study_run.output)}, as_json=as_json)


def _check(study_run: StudyRun, only: list[str]) -> None:
    """Refuse recipes, methods and settings that a comparison of the study would refuse, hours later perhaps."""
    from seqreg.studies.compare import plan as comparison

    for step in study_run.steps():
        if step.command == "compare" and (not only or step.name in only):
            try:
                comparison.make(
                    str(step.recipe), study_run.study.methods(step), write_seeds(study_run.seeds_of(step)),
                    variants=study_run.variants_of(step), settings=study_run.settings_of(step), baseline=step.baseline,
                    arms=step.arms, search=step.search, primary=study_run.study.primary_of(step),
                )  # fmt: skip
            except BadInput as error:
                raise BadInput(f"{study_run.name}: {step.name}: {error}") from None


def _list(size: str, as_json: bool) -> None:
    from research.index import plan_table

    table = plan_table(study_file.names(), size)
    print_result(
        [dict(zip(table.columns, row, strict=True)) for row in table.rows], terminal_table(table), as_json=as_json
    )


def _plan(study_run: StudyRun, only: list[str], minutes: float | None, as_json: bool) -> None:
    commands = [command for command in study_run.commands() if not only or command.step.name in only]
    rows: list[list[Any]] = []
    for step in study_run.steps():
        some = [command for command in commands if command.step.name == step.name]
        if some:
            runs, each = sum(command.runs for command in some), study_run.minutes(step, minutes)
            rows.append(
                [step.name, step.command, len(some), runs, each, runs * each / 60 if each is not None else None]
            )
    total = sum(row[-1] or 0.0 for row in rows)
    rows.append(["all", "", len(commands), sum(row[3] for row in rows), None, total or None])
    columns = ["step", "command", "processes", "runs", "minutes per run", "core-hours"]
    left = {step.name: study_run.study.left_out(step, study_run.size) for step in study_run.study.steps}
    document = {
        "commands": [command.line for command in commands], "runs": rows[-1][3], "hours": rows[-1][5],
        "left_out": {step: why for step, why in left.items() if why},
    }  # fmt: skip
    lines = [plain(command.line) for command in commands]
    lines += [plain(f"{step}: not run in the size {study_run.size}: {why}") for step, why in left.items() if why]
    print_result(document, *lines, terminal_table(Table(study_run.study.title, columns, rows)), as_json=as_json)


def _archive(study_run: StudyRun, path: Path, as_json: bool) -> None:
    from research import archive, page

    if not path.name.endswith(archive.ENDING):
        raise BadInput(f"--archive {path}: expected a name that ends in {archive.ENDING}")
    packed = archive.pack(study_run)
    if path.is_file():
        earlier = archive.read(path)
        page.check_unchanged(earlier, study_run.study)
        packed = packed.after(earlier)
    packed.write(path)
    size = path.stat().st_size
    runs = sum(name.endswith("metrics.json") for step in packed.steps.values() for name in step.files)
    say(f"Written: {path}, {size / 1000:.0f} kB, {runs} runs")
    print_result({"written": str(path), "bytes": size, "runs": runs}, as_json=as_json)


def _make_pages(folder: Path | None, as_json: bool) -> None:
    from research import index
    from seqreg.studies.compare.conclusions import judge

    assert folder is not None
    if not folder.is_dir():
        raise BadInput(f"--pages {folder}: no such folder")
    written = [str(path) for path in index.build(folder, judge)]
    for path in written:
        say(f"Written: {path}")
    print_result({"written": written}, as_json=as_json)


if __name__ == "__main__":
    run(app, "python -m research")
