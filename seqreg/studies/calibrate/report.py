"""What `seqreg calibrate` found, in sentences, tables and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from seqreg.metrics.calibration import Coverage, Outcomes, Temperature, chance_error
from seqreg.metrics.classification import spearman
from seqreg.studies.common.findings import Table

COLUMNS = ("count", "accuracy", "confidence", "ece", "by chance", "adaptive_ece", "brier", "nll")


@dataclass(frozen=True)
class Part:
    """Outcomes of a kind, before and after the temperature, with their numbers."""

    name: str
    before: Outcomes
    after: Outcomes
    bins: int
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for when, outcomes in (("before", self.before), ("after", self.after)):
            found, mass = (chance_error(outcomes.confidence, self.bins, equal) for equal in ("width", "mass"))
            self.numbers[when] = {
                **outcomes.summary(self.bins), "by chance": found[1], "adaptive by chance": mass[1],
            }  # fmt: skip

    def verdict(self) -> str:
        """In a sentence, what the numbers before the temperature say."""
        found = self.numbers["before"]
        text = (
            f"{self.name}: accuracy {found['accuracy']:.3f}, mean confidence {found['confidence']:.3f}, "
            f"ECE {found['ece']:.3f} (adaptive {found['adaptive_ece']:.3f}) on {found['count']:.0f}: "
        )
        if found["ece"] <= found["by chance"] and found["adaptive_ece"] <= found["adaptive by chance"]:
            return f"{text}no more than a perfectly calibrated model may show on so few ({found['by chance']:.3f})."
        off, chance = (
            abs(found["overconfidence"]),
            (f"by chance up to {found['by chance']:.3f}, adaptive {found['adaptive by chance']:.3f}"),
        )
        if off < found["ece"] / 2:
            return f"{text}too sure in places and too modest in others ({chance})."
        return f"{text}{'overconfident' if found['overconfidence'] > 0 else 'underconfident'} by {off:.3f} ({chance})."


@dataclass(frozen=True)
class Texts:
    """Generated texts: their mean log-probability a token against their ROUGE-L."""

    logp: NDArray[Any]
    rouge: NDArray[Any]
    coverage: Coverage

    @property
    def rank(self) -> float:
        return spearman(self.logp, self.rouge)


@dataclass(frozen=True)
class Study:
    """All that was measured.

    Args:
        parts: classes; or all tokens, those that end a sequence, and the others
        fitted: the temperature
        names, sizes: of the examples that it was fitted on, and of those that are reported
        coverage: of classes, or of generated texts
        texts: None for a classifier, and where no text was generated
    """

    parts: Sequence[Part]
    fitted: Temperature
    names: tuple[str, str]
    sizes: tuple[int, int]
    coverage: Coverage | None
    texts: Texts | None

    def summary(self) -> list[str]:
        """Every result as a sentence."""
        fitted, coverage, first = self.fitted, self.coverage, self.parts[0].numbers
        on, other = (f"{size} examples of {name}" for size, name in zip(self.sizes, self.names, strict=True))
        changes = [
            f"{key} {first['before'][key.lower()]:.3f} to {first['after'][key.lower()]:.3f}"
            for key in ("ECE", "Brier", "NLL")
        ]
        found = [
            f"Measured on {other}; the temperature is fitted on {on}.",
            *(part.verdict() for part in self.parts),
            f"Temperature {fitted.value:.3g}: {', '.join(changes)}; NLL where it was fitted {fitted.before:.3f} to "
            f"{fitted.after:.3f}.",
        ]
        if fitted.at_end:
            found.append("The temperature is at the end of its range: the examples it was fitted on cannot tell it.")
        if coverage is not None:
            found.append(
                f"Surest first, the area under {'risk (1 - ROUGE-L)' if self.texts else 'error'} and coverage is "
                f"{coverage.area:.3f}: {coverage.best:.3f} is the best possible, {coverage.random:.3f} a confidence "
                "that knows nothing."
            )
        if self.texts is not None:
            found.append(f"Spearman's correlation of log-probability a token and ROUGE-L is {self.texts.rank:.3f}.")
        return found

    def tables(self) -> list[Table]:
        rows = [
            [part.name, when, *(int(found[key]) if key == "count" else float(found[key]) for key in COLUMNS)]
            for part in self.parts
            for when, found in part.numbers.items()
        ]
        tables = [Table("Calibration before and after the temperature", ["of", "when", *COLUMNS], rows)]
        if self.coverage is not None:
            title = "Generated texts: log-probability and ROUGE-L" if self.texts else "Risk and coverage"
            found = {"area": self.coverage.area, "best": self.coverage.best, "knowing nothing": self.coverage.random}
            found |= {"Spearman": self.texts.rank} if self.texts else {}
            tables.append(Table(title, list(found), [list(found.values())]))
        return tables

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "fitted_on": self.names[0], "measured_on": self.names[1], "examples": list(self.sizes),
            "temperature": self.fitted.value, "temperature_at_end": self.fitted.at_end,
            "parts": {part.name: part.numbers for part in self.parts},
        }  # fmt: skip
        if self.coverage is not None:
            area, best, random = self.coverage.area, self.coverage.best, self.coverage.random
            found["coverage"] = {"area": area, "best": best, "random": random}
        if self.texts is not None:
            rouge, logp = float(self.texts.rouge.mean()), float(self.texts.logp.mean())
            found["texts"] = {"spearman": self.texts.rank, "rougeL": rouge, "logp": logp}
        return found
