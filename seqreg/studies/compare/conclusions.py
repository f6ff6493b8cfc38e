"""From the scores of a comparison to tables and plain sentences; "significant" only after correction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table

from seqreg.studies.common.findings import FOLDER, Finding, Table
from seqreg.studies.common.markdown import cell
from seqreg.studies.common.seeds import write_seeds
from seqreg.studies.compare import drift
from seqreg.studies.compare import results as stored
from seqreg.studies.compare.arms import ARMS
from seqreg.studies.compare.choices import against_free, search_table, searched
from seqreg.studies.compare.jobs import JobState
from seqreg.studies.compare.judgement import (
    BETTER,
    BOTH_COLLAPSED,
    DESCRIBED,
    FEW_EXAMPLES,
    FEW_SEEDS,
    NOT_MEASURED,
    NOT_SHOWN,
    WORSE,
    both_collapsed,
    counted,
    fallen,
    headline,
    is_better,
    judgement,
    judgement_words,
    listed,
    same_score,
    unjudged,
)
from seqreg.studies.compare.plan import Job
from seqreg.studies.compare.results import MethodResults, Results
from seqreg.studies.compare.significance import ONE_MODEL, TWO_LEVEL, measure, write_examples
from seqreg.workbench.text.escape import plain

KIND = "compare"
EXAMPLES = "examples.jsonl"
CHANGES = "What the methods change"
START = "before training"
"""The row of the model that all runs started from."""
_NONE = object()


def judge(folder: Path, *, trust_changes: bool = False) -> Finding:
    """Judge the finished runs of a comparison, and write the verdict."""
    return write_verdict(stored.load(folder, trust_changes=trust_changes))


def write_verdict(results: Results) -> Finding:
    """Judge results that are loaded already, and write the verdict."""
    folder, values = results.folder, measure(results)
    text, tables = sentences(results, values), tables_of(results, values)
    values |= {"headline": headline(results, values)}
    finding = Finding(KIND, "Comparison", results.plan.command(folder), text, tables, [], values)
    finding.write(folder / FOLDER)
    write_examples(results, folder / FOLDER / EXAMPLES)
    return finding


def sentences(results: Results, values: dict[str, Any]) -> list[str]:
    """The verdict in plain words."""
    metric, base, methods, plan = values["metric"], values["baseline"], values["methods"], results.plan
    lines = []
    unfinished = [run for method in results.methods.values() for run in method.open]
    if unfinished:
        total = len(plan.jobs(results.folder))
        lines.append(f"Preliminary: {len(unfinished)} of {total} runs are not finished{_stopped(unfinished)}.")
    lines += searched(values)
    start = "" if values["start"]["mean"] is None else f"; before training it is {values['start']['mean']:.2f}"
    lines.append(f"{base} has {metric} {describe(methods[base])} on {values['split']}{start}.")
    lines += [f"{name}: {stats['unlearned']}." for name, stats in methods.items() if stats["unlearned"]]
    lines += [_verdict(name, stats, values, plan.seeds) for name, stats in methods.items() if name != base]
    judged = [name for name, stats in methods.items() if not stats.get("missing") and not unjudged(stats, values)]
    lines += against_free(values, judged)
    planned = {**methods, **values["without"]}
    lines += [_failures(some, planned[some.name]["planned"]) for some in results.methods.values() if some.failed]
    lines += [early_stops(some) for some in results.scored if any(map(_stopped_early, some.metrics.values()))]
    lines += [_collapsed(name, stats) for name, stats in methods.items() if stats["collapse"]["collapsed"]]
    lines += _best_seed(methods, values["greater_is_better"])
    if plan.primary_late:
        lines.append("The primary comparisons were named after the comparison was begun.")
    if plan.extended:
        sizes = " to ".join(str(len(seeds)) for seeds in [*(old["seeds"] for old in plan.extended), plan.seeds])
        lines.append(f"Seeds or methods were added after a first look (seeds: {sizes}): p values are then too small.")
    return lines


def _stopped_early(metrics: dict[str, Any]) -> bool:
    return bool(metrics.get("train", {}).get("stopped_early"))


def early_stops(method: MethodResults) -> str:
    """With which seeds the runs of a method stopped early, and which steps their models are of."""
    runs = [method.metrics[seed]["train"] for seed in sorted(method.metrics) if _stopped_early(method.metrics[seed])]
    steps, models = (listed([str(run[key]) for run in runs]) for key in ("steps", "model_step"))
    kept = "" if steps == models else f"; their models are those of step{'s' * (len(runs) > 1)} {models}"
    return (
        f"{method.name} stopped early with {len(runs)} of {counted(len(method.metrics), 'seed')}, after {steps} steps"
        f"{kept}."
    )


def _best_seed(methods: dict[str, Any], greater_is_better: bool) -> list[str]:
    """Who has the best mean and who the best single seed, where that are two."""
    choose, word, end = (max, "highest", "maximum") if greater_is_better else (min, "lowest", "minimum")
    seeds = {name: choose(stats["scores"]) for name, stats in methods.items()}
    best, most = choose(methods, key=lambda name: methods[name]["mean"]), choose(seeds, key=lambda name: seeds[name])
    if seeds[best] == seeds[most]:
        return []
    return [
        f"The {word} mean is {best}'s ({methods[best]['mean']:.2f}), the {word} single seed {most}'s "
        f"({seeds[most]:.2f}): the {end} of several seeds rewards spread."
    ]


def _title(values: dict[str, Any]) -> str:
    return f"{values['metric']} on {values['split']}, in percent" + (
        "" if values["greater_is_better"] else "; lower is better"
    )


def _stopped(unfinished: Sequence[tuple[Job, JobState]]) -> str:
    """Why the first run that was stopped or refused has ended; nothing if none was."""
    for job, state in unfinished:
        if state.code is not None:
            line = state.line.rstrip(".")
            return f"; {job.title} was stopped with exit code {state.code}: {line}"
    return ""


def _failures(method: MethodResults, planned: int) -> str:
    """How many runs of a method failed, and what that means for its scores."""
    job, state = method.failed[0]
    which = "" if len(job.sources) > 1 else f" with seed {job.seed} and"
    meaning = "Its scores are those of the others, and flatter it." if method.metrics else "It has no scores."
    return (
        f"{len(method.failed)} of {planned} runs of {method.name} failed, the first{which or ' with'} exit "
        f"code {state.code}: {state.line.rstrip('.')}. {meaning}"
    )


def describe(stats: dict[str, Any]) -> str:
    """Mean, sd and interval in words."""
    if stats["sd"] is None:
        return f"{stats['mean']:.2f} with one seed"
    low, high = stats["student"]
    spread = f"sd {stats['sd']:.2f}, 95% interval {low:.2f} to {high:.2f}"
    return f"{stats['mean']:.2f} on average over {stats['n']} seeds ({spread})"


def _verdict(name: str, stats: dict[str, Any], values: dict[str, Any], seeds: Sequence[int]) -> str:
    """What can be said of a method; see docs/evaluation.md for the rule."""
    base, plus = values["baseline"], stats["difference"]
    if plus["test"] == ONE_MODEL:
        return (
            f"{name} has {values['metric']} {stats['mean']:.2f}, {plus['difference']:+.2f} against the mean of {base}: "
            "it is one model of all seeds, without a spread over them, so the difference is described and not tested."
        )
    cost = "" if stats["time"] is None else f", at {stats['time']:.2f} times the {values['cost']}"
    cost = f", without training (made and scored in {stats['seconds']:.1f} s)" if stats["free"] else cost
    if stats.get("described"):
        ends = f" (95% interval {plus['interval'][0]:+.2f} to {plus['interval'][1]:+.2f})" if plus["interval"] else ""
        return f"{name} against {base}, {DESCRIBED}: {plus['difference']:+.2f} {values['metric']}{ends}{cost}."
    if same_score(stats, values) and not both_collapsed(stats, values):
        return f"{name} against {base}: not measured, for every run of both has {values['metric']} {stats['mean']:.2f}."
    if (plus["p"] is None or stats["missing"]) and not both_collapsed(stats, values):
        more, beyond = counted(stats["missing"], "seed"), stats["missing"] - stats["waiting"]
        further = [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + beyond)]
        hint = f"--extend --seeds {write_seeds(further)}" if beyond > 0 else "the same command trains them"
        return (
            f"{name} against {base}: not enough seeds for a verdict. With {counted(stats['pairs'], 'seed')} and "
            f"{counted(values['tests'], 'test')} the smallest p that does not lean on normality is "
            f"{stats['reachable']:.2g}, above {values['alpha']:g}: {more} more needed ({hint}). The difference so "
            f"far is {plus['difference']:+.2f}."
        )
    why = unjudged(stats, values)
    if why:
        return f"{name} against {base}: {why}. The difference is {plus['difference']:+.2f}."
    low, high = plus["interval"]
    text = (
        f"{plus['difference']:+.2f} {values['metric']} (95% interval {low:+.2f} to {high:+.2f}, corrected "
        f"p = {stats['holm']:.2g}){cost}"
    )
    if stats["detectable"] is not None:
        text += f"; with these seeds a difference of {stats['detectable']:.2f} is found with 80% power"
    if plus["test"] == TWO_LEVEL and stats["pairs"] < max(stats["n"], values["methods"][base]["n"]):
        text += f", over the {counted(stats['pairs'], 'seed')} that both have"
    collapsed = [who for who in (name, base) if fallen(values["methods"][who])]
    text += "".join(f"; but the output of {who} has collapsed" for who in collapsed)
    if stats["holm"] <= values["alpha"]:
        way = "better" if is_better(plus["difference"], values) else "worse"
        return f"{name} is significantly {way} than {base}: {text}."
    return f"{name} is not shown to differ from {base}: {text}."


def _collapsed(name: str, stats: dict[str, Any]) -> str:
    collapse = stats["collapse"]
    how = (
        f"the most common prediction is {collapse['most_common']:.0f}% of all on average, of the references "
        f"{collapse['most_common_reference']:.0f}%"
        if "most_common" in collapse
        else f"the predicted numbers have {collapse['spread']:.2g}% of the references' sd"
    )
    return (
        f"The output of {name} has collapsed with {collapse['collapsed']} of {counted(collapse['of'], 'seed')} "
        f"({how}): its differences say that a run broke down, not how good a method is."
    )


def tables_of(results: Results, values: dict[str, Any]) -> list[Table]:
    """Quality, then stability and cost, then settings, then drift and retention, then the other scores."""
    tables = [_quality_table(values), _stability_table(values, results.metric == "rougeL"), settings_table(results)]
    tables += [search_table(values)] if values["search"] else []
    tables += drift.tables(values["drift"], values["baseline"])
    return [*tables, _others_table(values)] if values["others"] else tables


def _quality_table(values: dict[str, Any]) -> Table:
    columns = ["method", "seeds", "failed", "mean", "sd", "median", "max", "95% interval", "BCa interval"]
    columns += [f"minus {values['baseline']}", "95% interval of it", "p", "p (Holm)", "found with 80% power", "verdict"]
    start = values["start"]
    rows = [[START, start["n"], None, start["mean"], start["sd"], *[None] * 2, *[""] * 8]] if start["n"] else []
    rows += [
        [name, *(stats[key] for key in ("n", "failed", "mean", "sd", "median", "max")), pair(stats["student"]),
         pair(stats["interval"]), *_difference_cells(stats, values)]
        for name, stats in values["methods"].items()
    ]  # fmt: skip
    for name, stats in values["without"].items():
        rows.append(
            [name, 0, stats["failed"], *[None] * 6, *[""] * 5, "not finished" if stats["open"] else "all failed"]
        )
    return Table(_title(values), columns, rows)


def _stability_table(values: dict[str, Any], texts: bool) -> Table:
    methods, base = values["methods"], values["baseline"]
    alike = {"equal": "equal predictions (%)"} | ({"rougeL": "ROUGE-L between seeds"} if texts else {})
    varied = {"distinct": "distinct predictions (%)", "most_common": "most common prediction (%)"}
    if "spread" in methods[base]["collapse"]:
        varied = {"spread": "sd / references' (%)"}
    columns = ["method", "sd", "95% interval of the sd", "failed", "collapsed", *varied.values(), *alike.values()]
    columns += [f"{values['cost']}, seconds (median)", f"time / {base}"]
    rows = [
        [name, stats["sd"], pair(stats["sd_interval"]), f"{stats['failed']} of {stats['planned']}",
         f"{stats['collapse']['collapsed']} of {stats['collapse']['of']}", *(stats["collapse"][key] for key in varied),
         *((stats["agreement"] or {}).get(key) for key in alike), stats["seconds"], _times(stats)]
        for name, stats in methods.items()
    ]  # fmt: skip
    rows += [
        [name, None, "", f"{stats['failed']} of {stats['planned']}", "", *[None] * (len(varied) + len(alike) + 2)]
        for name, stats in values["without"].items()
    ]
    free = (
        "; free arms are not trained: their seconds are those of making and scoring them"
        if any(stats["free"] for stats in methods.values())
        else ""
    )
    return Table(f"Stability and cost{free}", columns, rows)


def _times(stats: dict[str, Any]) -> str | None:
    return None if stats["time"] is None else f"{stats['time']:.2f}x"


def _others_table(values: dict[str, Any]) -> Table:
    columns = ["score", "method", "mean", "sd", "median", "max", f"minus {values['baseline']}", "95% interval of it"]
    rows = [
        [key, name, stats["mean"], stats["sd"], stats["median"], stats["max"]]
        + (
            [stats["difference"]["difference"], pair(stats["difference"]["interval"])]
            if stats["difference"]
            else ["", ""]
        )
        for key, methods in values["others"].items()
        for name, stats in methods.items()
    ]
    return Table("Other scores, described and not tested", columns, rows)


def settings_table(results: Results) -> Table:
    """What every method changes about the baseline's settings."""
    plan = results.plan
    base = plan.settings_of(plan.baseline)
    rows = []
    for name in plan.methods:
        settings = plan.settings_of(name)
        differs = [key for key, value in settings.items() if base.get(key, _NONE) != value and _tells(key, value)]
        gone = [
            f"no {key}" for key, value in base.items()
            if key not in settings and _tells(key, value) and not any(k.startswith(f"{key}.") for k in settings)
        ]  # fmt: skip
        changes = [*(_setting(key, settings[key]) for key in differs), *gone]
        if name in plan.arms:
            changes = [f"not trained: seqreg soup {' '.join(ARMS[name])} of {plan.baseline}".replace("  ", " ")]
        rows.append([name, f"--arm {name}" if name in plan.arms else plan.given.get(name, name), "; ".join(changes)])
    return Table(CHANGES, ["method", "--terms", f"settings that differ from {plan.baseline}"], rows)


def _tells(key: str, value: Any) -> bool:
    """Whether a setting says something: a section without any key, or null, does not."""
    return value is not None and (value != {} or "." in key)


def _setting(key: str, value: Any) -> str:
    return f"{key} (defaults)" if value == {} else f"{key} = {value if isinstance(value, str) else json.dumps(value)}"


def _difference_cells(stats: dict[str, Any], values: dict[str, Any]) -> list[Any]:
    if "difference" not in stats:
        return ["", "", "", "", "", "baseline"]
    plus, kind = stats["difference"], judgement(stats, values)
    judged = kind in (BETTER, WORSE, NOT_SHOWN)  # a p that no verdict may rest on is not shown
    p, corrected = (f"{value:.2g}" if judged else "" for value in (plus["p"], stats["holm"]))
    power = f"{stats['detectable']:.2f}" if judged and stats["detectable"] is not None else ""
    return [f"{plus['difference']:+.2f}", pair(plus["interval"]), p, corrected, power, judgement_words(stats, values)]


def pair(ends: Any) -> str:
    return "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def verdict_table(values: dict[str, Any]) -> rich.table.Table:
    """The verdict as a table that fits a terminal; the page has everything."""
    base, methods = values["baseline"], values["methods"]
    fallen = [f"{n} with {stats['collapse']['collapsed']} of {stats['n']}" for n, stats in methods.items()
              if stats["collapse"]["collapsed"]]  # fmt: skip
    caption = f"{values['examples']} test examples; time is the {values['cost']} over {base}'s"
    free = [name for name, stats in methods.items() if stats["free"]]
    caption += f"; {', '.join(free)}: made of {base}'s weights" if free else ""
    caption += f"; collapsed: {', '.join(fallen)} seeds" if fallen else ""
    table = rich.table.Table(title=plain(_title(values)), caption=plain(caption))
    for place, head in enumerate(["method", "seeds", "mean", "sd", "max", f"minus {base}", "p (Holm)", "time"]):
        table.add_column(plain(head), justify="right" if place else "left", no_wrap=place == 0)
    if (start := values["start"])["n"]:
        table.add_row(START, *(cell(start.get(key)) for key in ("n", "mean", "sd")), *[""] * 4)
    for name, stats in methods.items():
        plus, _, _, corrected, _, _ = _difference_cells(stats, values)
        if "difference" in stats:
            words = {ONE_MODEL: "one model", DESCRIBED: "not tested", FEW_SEEDS: FEW_SEEDS}
            words |= dict.fromkeys((FEW_EXAMPLES, BOTH_COLLAPSED, NOT_MEASURED), "no verdict")
            corrected = words.get(judgement(stats, values), corrected)
        cells = [cell(stats[key]) for key in ("n", "mean", "sd", "max")]
        table.add_row(plain(name), *cells, plus, corrected, _times(stats) or "")
    for name, stats in values["without"].items():
        table.add_row(plain(name), "0", *[""] * 3, "open" if stats["open"] else "failed", "", "")
    return table
