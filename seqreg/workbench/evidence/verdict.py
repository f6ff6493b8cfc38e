"""From the scores of a comparison to tables and plain sentences; the word "significant" has to be earned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich.table

from seqreg.workbench.evidence import findings
from seqreg.workbench.evidence.findings import Finding, Table
from seqreg.workbench.evidence.gather import Gathered, gather
from seqreg.workbench.evidence.measure import measure, write_examples
from seqreg.workbench.untrusted import plain

KIND = "compare"
EXAMPLES = "examples.jsonl"


def judge(folder: Path) -> Finding:
    """Judge what is finished of a comparison, and write it down."""
    found = gather(folder)
    values = measure(found)
    finding = Finding(
        KIND, "Comparison", found.plan.command(folder), sentences(found, values), tables_of(found, values), [], values
    )
    finding.write(folder / findings.FOLDER)
    write_examples(found, folder / findings.FOLDER / EXAMPLES)
    return finding


def sentences(found: Gathered, values: dict[str, Any]) -> list[str]:
    """The verdict in plain words."""
    metric, base, methods = values["metric"], values["baseline"], values["methods"]
    said = []
    unfinished = sum(len(method.open) for method in found.methods.values())
    if unfinished:
        total = len(found.plan.seeds) * len(found.plan.methods)
        said.append(f"Preliminary: {unfinished} of {total} trainings are not finished.")
    said.append(f"{base} has {metric} {describe(methods[base])} on {values['split']}.")
    said += [_about(name, one, values) for name, one in methods.items() if name != base]
    for method in found.methods.values():
        if method.failed:
            job, state = method.failed[0]
            said.append(
                f"{len(method.failed)} of {len(found.plan.seeds)} trainings of {method.name} failed, the first with "
                f"seed {job.seed} and exit code {state.code}: {state.line}. Its scores are those of the others, and "
                "flatter it."
            )
    best, most = (max(methods, key=lambda name: methods[name][key]) for key in ("mean", "max"))
    if best != most:
        said.append(
            f"The highest mean is {best}'s ({methods[best]['mean']:.2f}), the highest single seed {most}'s "
            f"({methods[most]['max']:.2f}): the maximum of several seeds rewards spread."
        )
    if found.plan.extended:
        sizes = " to ".join(str(len(one["seeds"])) for one in [*found.plan.extended, {"seeds": found.plan.seeds}])
        said.append(f"Seeds or methods were added after a first look (seeds: {sizes}): p values are then too small.")
    return said


def describe(one: dict[str, Any]) -> str:
    """Mean, sd and interval in words."""
    if one["sd"] is None:
        return f"{one['mean']:.2f} with one seed"
    low, high = one["interval"]
    return (
        f"{one['mean']:.2f} on average over {one['n']} seeds (sd {one['sd']:.2f}, 95% interval {low:.2f} to {high:.2f})"
    )


def _about(name: str, one: dict[str, Any], values: dict[str, Any]) -> str:
    """What can be said of a method; see docs/evaluation.md for the rule."""
    base, plus = values["baseline"], one["difference"]
    if plus["p"] is None or one["missing"]:
        more, beyond = seeds_of(one["missing"]), one["missing"] - one["waiting"]
        hint = f"--extend --seeds {values['planned'] + beyond}" if beyond > 0 else "the same command goes on with them"
        return (
            f"{name} against {base}: not enough seeds for a verdict. With {seeds_of(one['pairs'])} and "
            f"{values['tests']} tests the smallest p is {one['reachable']:.2g}, above {values['alpha']:g}: {more} more "
            f"needed ({hint}). The difference so far is {plus['difference']:+.2f}."
        )
    low, high = plus["interval"]
    numbers = (
        f"{plus['difference']:+.2f} {values['metric']} (95% interval {low:+.2f} to {high:+.2f}, corrected "
        f"p = {one['holm']:.2g}), at {one['time']:.2f} times the training time"
    )
    if one["holm"] <= values["alpha"]:
        way = "better" if plus["difference"] > 0 else "worse"
        return f"{name} is significantly {way} than {base}: {numbers}."
    return f"{name} is not shown to differ from {base}: {numbers}."


def seeds_of(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def tables_of(found: Gathered, values: dict[str, Any]) -> list[Table]:
    """Quality, then stability and cost, then the other scores."""
    methods, base = values["methods"], values["baseline"]
    quality = [
        [name, one["n"], one["failed"], one["mean"], one["sd"], one["median"], one["max"], pair(one["interval"]),
         *_difference_cells(one, values)]
        for name, one in methods.items()
    ]  # fmt: skip
    alike = ["equal predictions (%)", "ROUGE-L between seeds"] if found.texts else ["equal predictions (%)"]
    stability = [
        [name, one["sd"], pair(one["sd_interval"]), f"{one['failed']} of {values['planned']}",
         *((one["agreement"] or {}).get(key) for key in (["equal", "rougeL"] if found.texts else ["equal"])),
         one["seconds"], None if one["time"] is None else f"{one['time']:.2f}x"]
        for name, one in methods.items()
    ]  # fmt: skip
    spread = ["method", "sd", "95% interval of the sd", "failed", *alike, "seconds (median)", f"time / {base}"]
    others = [
        [key, name, row["mean"], row["sd"], row["median"], row["max"]]
        + ([row["difference"]["difference"], pair(row["difference"]["interval"])] if row["difference"] else ["", ""])
        for key, rows in values["others"].items()
        for name, row in rows.items()
    ]
    head = ["method", "seeds", "failed", "mean", "sd", "median", "max", "95% interval"]
    plus = [f"minus {base}", "95% interval of it", "p", "p (Holm)", "verdict"]
    found_tables = [
        Table(f"{values['metric']} on {values['split']}, in percent", [*head, *plus], quality),
        Table("Stability and cost", spread, stability),
    ]
    if others:
        columns = ["score", "method", "mean", "sd", "median", "max", f"minus {base}", "95% interval of it"]
        found_tables.append(Table("Other scores, described and not tested", columns, others))
    return found_tables


def _difference_cells(one: dict[str, Any], values: dict[str, Any]) -> list[Any]:
    if "difference" not in one:
        return ["", "", "", "", "baseline"]
    plus = one["difference"]
    p, corrected = ("" if value is None else f"{value:.2g}" for value in (plus["p"], one["holm"]))
    if plus["p"] is None or one["missing"]:
        word = f"{seeds_of(one['missing'])} more needed"
    elif one["holm"] <= values["alpha"]:
        word = "significantly better" if plus["difference"] > 0 else "significantly worse"
    else:
        word = "no difference shown"
    return [f"{plus['difference']:+.2f}", pair(plus["interval"]), p, corrected, word]


def pair(ends: Any) -> str:
    return "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def cell(value: Any) -> str:
    """A value of a table as text: two decimals for a score."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2g}"
    return str(value)


def shown(values: dict[str, Any]) -> rich.table.Table:
    """The verdict as a table that fits a terminal; the page has everything."""
    heads = ["method", "seeds", "mean", "sd", "median", "max", "minus first", "p (Holm)", "time"]
    made = rich.table.Table(title=plain(f"{values['metric']} on {values['split']}, in percent"))
    for place, head in enumerate(heads):
        made.add_column(plain(head), justify="right" if place else "left", no_wrap=place == 0)
    for name, one in values["methods"].items():
        plus, _, _, corrected, _ = _difference_cells(one, values)
        time = "" if one["time"] is None else f"{one['time']:.2f}x"
        numbers = [cell(one[key]) for key in ("n", "mean", "sd", "median", "max")]
        made.add_row(plain(name), *numbers, plus, corrected, time)
    return made
