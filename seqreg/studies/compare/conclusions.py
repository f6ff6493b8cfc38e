"""From the scores of a comparison to tables and plain sentences; the word "significant" has to be earned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table

from seqreg.studies.common import findings
from seqreg.studies.common.findings import Finding, Table
from seqreg.studies.compare.comparison import Job, write_seeds
from seqreg.studies.compare.jobs import State
from seqreg.studies.compare.results import Gathered, Method, gather
from seqreg.studies.compare.significance import TWO_LEVEL, measure, write_examples
from seqreg.workbench.text.escape import plain

KIND = "compare"
EXAMPLES = "examples.jsonl"
CHANGES = "What the methods change"
_NONE = object()


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
    unfinished = [one for method in found.methods.values() for one in method.open]
    if unfinished:
        total = len(found.plan.seeds) * len(found.plan.methods)
        said.append(f"Preliminary: {len(unfinished)} of {total} trainings are not finished{_stopped(unfinished)}.")
    said.append(f"{base} has {metric} {describe(methods[base])} on {values['split']}.")
    said += [_about(name, one, values, found.plan.seeds) for name, one in methods.items() if name != base]
    said += [_failures(method, values["planned"]) for method in found.methods.values() if method.failed]
    best, most = (max(methods, key=lambda name: methods[name][key]) for key in ("mean", "max"))
    said += [_collapsed(name, one) for name, one in methods.items() if one["collapse"]["collapsed"]]
    if best != most:
        said.append(
            f"The highest mean is {best}'s ({methods[best]['mean']:.2f}), the highest single seed {most}'s "
            f"({methods[most]['max']:.2f}): the maximum of several seeds rewards spread."
        )
    if found.plan.extended:
        sizes = " to ".join(str(len(one["seeds"])) for one in [*found.plan.extended, {"seeds": found.plan.seeds}])
        said.append(f"Seeds or methods were added after a first look (seeds: {sizes}): p values are then too small.")
    return said


def _stopped(unfinished: Sequence[tuple[Job, State]]) -> str:
    """What the first that was stopped or refused has said; nothing if none was."""
    for job, state in unfinished:
        if state.code is not None:
            line = state.line.rstrip(".")
            return f"; {job.method}, seed {job.seed} was stopped with exit code {state.code}: {line}"
    return ""


def _failures(method: Method, planned: int) -> str:
    """How many trainings of a method failed, and what that means for its scores."""
    job, state = method.failed[0]
    said = (
        f"{len(method.failed)} of {planned} trainings of {method.name} failed, the first with seed {job.seed} and exit "
        f"code {state.code}: {state.line.rstrip('.')}. "
    )
    return said + ("Its scores are those of the others, and flatter it." if method.metrics else "It has no scores.")


def describe(one: dict[str, Any]) -> str:
    """Mean, sd and interval in words."""
    if one["sd"] is None:
        return f"{one['mean']:.2f} with one seed"
    low, high = one["student"]
    spread = f"sd {one['sd']:.2f}, 95% interval {low:.2f} to {high:.2f}"
    return f"{one['mean']:.2f} on average over {one['n']} seeds ({spread})"


def _about(name: str, one: dict[str, Any], values: dict[str, Any], seeds: Sequence[int]) -> str:
    """What can be said of a method; see docs/evaluation.md for the rule."""
    base, plus = values["baseline"], one["difference"]
    if plus["p"] is None or one["missing"]:
        more, beyond = seeds_of(one["missing"]), one["missing"] - one["waiting"]
        further = [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + beyond)]
        hint = f"--extend --seeds {write_seeds(further)}" if beyond > 0 else "the same command goes on with them"
        return (
            f"{name} against {base}: not enough seeds for a verdict. With {seeds_of(one['pairs'])} and "
            f"{tests_of(values['tests'])} the smallest p that does not lean on normality is {one['reachable']:.2g}, "
            f"above {values['alpha']:g}: {more} more needed ({hint}). The difference so far is "
            f"{plus['difference']:+.2f}."
        )
    why = _unjudged(one, values)
    if why:
        return f"{name} against {base}: {why}. The difference is {plus['difference']:+.2f}."
    low, high = plus["interval"]
    numbers = (
        f"{plus['difference']:+.2f} {values['metric']} (95% interval {low:+.2f} to {high:+.2f}, corrected "
        f"p = {one['holm']:.2g}){_cost_of(one, values)}"
    )
    if plus["test"] == TWO_LEVEL and one["pairs"] < max(one["n"], values["methods"][base]["n"]):
        numbers += f", over the {seeds_of(one['pairs'])} that both have"
    fallen = [who for who, found in ((name, one), (base, values["methods"][base])) if _fallen(found)]
    numbers += "".join(f"; but the output of {who} has collapsed" for who in fallen)
    if one["holm"] <= values["alpha"]:
        way = "better" if plus["difference"] > 0 else "worse"
        return f"{name} is significantly {way} than {base}: {numbers}."
    return f"{name} is not shown to differ from {base}: {numbers}."


def _cost_of(one: dict[str, Any], values: dict[str, Any]) -> str:
    return "" if one["time"] is None else f", at {one['time']:.2f} times the {values['cost']}"


def _unjudged(one: dict[str, Any], values: dict[str, Any]) -> str:
    """Why a difference is not judged although there are seeds enough; "" if it is."""
    if values["examples"] < values["examples_needed"]:
        return f"too few test examples for a verdict: {values['examples']}, and {values['examples_needed']} are needed"
    if _fallen(one) and _fallen(values["methods"][values["baseline"]]):
        return "the output of both has collapsed, so a verdict between them means nothing"
    return ""


def _fallen(one: dict[str, Any]) -> bool:
    """Whether the output of a method has collapsed with half of its seeds or more."""
    return 2 * int(one["collapse"]["collapsed"]) >= int(one["collapse"]["of"])


def _collapsed(name: str, one: dict[str, Any]) -> str:
    found = one["collapse"]
    some = (
        f"the most common prediction is {found['most_common']:.0f}% of all on average, of the references "
        f"{found['most_common_reference']:.0f}%"
        if "most_common" in found
        else f"the predicted numbers have {found['spread']:.2g}% of the references' sd"
    )
    return (
        f"The output of {name} has collapsed with {found['collapsed']} of {seeds_of(found['of'])} ({some}): its "
        "differences say that a training broke down, not how good a method is."
    )


def seeds_of(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def tests_of(count: int) -> str:
    return f"{count} test{'s' if count != 1 else ''}"


def tables_of(found: Gathered, values: dict[str, Any]) -> list[Table]:
    """Quality, then stability and cost, then the other scores."""
    methods, base = values["methods"], values["baseline"]
    quality = [
        [name, one["n"], one["failed"], one["mean"], one["sd"], one["median"], one["max"], pair(one["student"]),
         pair(one["interval"]),
         *_difference_cells(one, values)]
        for name, one in methods.items()
    ]  # fmt: skip
    quality += [
        [name, 0, one["failed"], *[None] * 6, *[""] * 4, _without(one)] for name, one in values["without"].items()
    ]
    alike = ["equal predictions (%)", "ROUGE-L between seeds"] if found.texts else ["equal predictions (%)"]
    varied = ["spread"] if "spread" in methods[base]["collapse"] else ["distinct", "most_common"]
    stability = [
        [name, one["sd"], pair(one["sd_interval"]), f"{one['failed']} of {values['planned']}",
         f"{one['collapse']['collapsed']} of {one['collapse']['of']}", *(one["collapse"][key] for key in varied),
         *((one["agreement"] or {}).get(key) for key in (["equal", "rougeL"] if found.texts else ["equal"])),
         one["seconds"], None if one["time"] is None else f"{one['time']:.2f}x"]
        for name, one in methods.items()
    ]  # fmt: skip
    stability += [
        [name, None, "", f"{one['failed']} of {values['planned']}", "", *[None] * (len(varied) + len(alike) + 1), None]
        for name, one in values["without"].items()
    ]
    heads = {"spread": "sd / references' (%)", "distinct": "distinct predictions (%)"}
    heads["most_common"] = "most common prediction (%)"
    spread = ["method", "sd", "95% interval of the sd", "failed", "collapsed", *(heads[key] for key in varied), *alike]
    spread += [f"{values['cost']}, seconds (median)", f"time / {base}"]
    others = [
        [key, name, row["mean"], row["sd"], row["median"], row["max"]]
        + ([row["difference"]["difference"], pair(row["difference"]["interval"])] if row["difference"] else ["", ""])
        for key, rows in values["others"].items()
        for name, row in rows.items()
    ]
    head = ["method", "seeds", "failed", "mean", "sd", "median", "max", "95% interval", "BCa interval"]
    plus = [f"minus {base}", "95% interval of it", "p", "p (Holm)", "verdict"]
    found_tables = [
        Table(f"{values['metric']} on {values['split']}, in percent", [*head, *plus], quality),
        Table("Stability and cost", spread, stability),
        settings_table(found),
    ]
    if others:
        columns = ["score", "method", "mean", "sd", "median", "max", f"minus {base}", "95% interval of it"]
        found_tables.append(Table("Other scores, described and not tested", columns, others))
    return found_tables


def settings_table(found: Gathered) -> Table:
    """What every method changes about the baseline's settings."""
    plan = found.plan
    base = plan.resolved.get(plan.baseline, {})
    rows = []
    for name in plan.methods:
        own = plan.resolved.get(name, {})
        changed = [_setting(key, own[key]) for key in own if base.get(key, _NONE) != own[key] and _tells(key, own[key])]
        gone = [f"no {key}" for key in base if key not in own and _tells(key, base[key])]
        gone = [line for line in gone if not any(key.startswith(f"{line[3:]}.") for key in own)]
        rows.append([name, plan.given.get(name, name), "; ".join([*changed, *gone])])
    return Table(CHANGES, ["method", "--terms", f"settings that differ from {plan.baseline}"], rows)


def _tells(key: str, value: Any) -> bool:
    """Whether a setting says something: a section without any key, or null, does not."""
    return value is not None and (value != {} or "." in key)


def _setting(key: str, value: Any) -> str:
    return f"{key} (defaults)" if value == {} else f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _difference_cells(one: dict[str, Any], values: dict[str, Any]) -> list[Any]:
    if "difference" not in one:
        return ["", "", "", "", "baseline"]
    plus = one["difference"]
    p, corrected = ("" if value is None else f"{value:.2g}" for value in (plus["p"], one["holm"]))
    if plus["p"] is None or one["missing"]:
        word = f"{seeds_of(one['missing'])} more needed"
    elif values["examples"] < values["examples_needed"]:
        word = f"none: {values['examples']} test examples"
    elif _unjudged(one, values):
        word = "means nothing: both collapsed"
    elif one["holm"] <= values["alpha"]:
        word = "significantly better" if plus["difference"] > 0 else "significantly worse"
    else:
        word = "no difference shown"
    if _fallen(one) != _fallen(values["methods"][values["baseline"]]):
        word += f" ({'it' if _fallen(one) else values['baseline']} collapsed)"
    return [f"{plus['difference']:+.2f}", pair(plus["interval"]), p, corrected, word]


def _without(one: dict[str, Any]) -> str:
    """The verdict on a method without any score."""
    return "not finished" if one["open"] else "all failed"


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
    base = values["baseline"]
    heads = ["method", "seeds", "mean", "sd", "max", f"minus {base}", "p (Holm)", "time"]
    made = rich.table.Table(title=plain(f"{values['metric']} on {values['split']}, in percent"))
    for place, head in enumerate(heads):
        made.add_column(plain(head), justify="right" if place else "left", no_wrap=place == 0)
    for name, one in values["methods"].items():
        plus, _, _, corrected, _ = _difference_cells(one, values)
        if "difference" in one:
            corrected = "too few seeds" if one["missing"] else "no verdict" if _unjudged(one, values) else corrected
        time = "" if one["time"] is None else f"{one['time']:.2f}x"
        numbers = [cell(one[key]) for key in ("n", "mean", "sd", "max")]
        made.add_row(plain(name), *numbers, plus, corrected, time)
    fallen = [f"{name} with {one['collapse']['collapsed']} of {one['n']}" for name, one in values["methods"].items()
              if one["collapse"]["collapsed"]]  # fmt: skip
    made.caption = plain(f"{values['examples']} test examples; time is the {values['cost']} over {base}'s")
    if fallen:
        made.caption += plain(f"; collapsed: {', '.join(fallen)} seeds")
    for name, one in values["without"].items():
        made.add_row(plain(name), "0", *[""] * 3, "open" if one["open"] else "failed", "", "")
    return made
