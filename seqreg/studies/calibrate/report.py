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
class CalibrationPart:
    """Outcomes of a kind, before and after the temperature, with their numbers."""

    name: str
    before: Outcomes
    after: Outcomes
    bins: int
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for when, outcomes in (("before", self.before), ("after", self.after)):
            width, mass = (chance_error(outcomes.confidence, self.bins, equal)[1] for equal in ("width", "mass"))
            self.numbers[when] = {**outcomes.summary(self.bins), "by chance": width, "adaptive by chance": mass}

    def verdict(self) -> str:
        """In a sentence, what the numbers before the temperature say."""
        before = self.numbers["before"]
        text = (
            f"{self.name}: accuracy {before['accuracy']:.3f}, mean confidence {before['confidence']:.3f}, "
            f"ECE {before['ece']:.3f} (adaptive {before['adaptive_ece']:.3f}) on {before['count']:.0f}: "
        )
        if before["ece"] <= before["by chance"] and before["adaptive_ece"] <= before["adaptive by chance"]:
            return f"{text}no more than a perfectly calibrated model may show on so few ({before['by chance']:.3f})."
        chance = f"by chance up to {before['by chance']:.3f}, adaptive {before['adaptive by chance']:.3f}"
        off = before["overconfidence"]
        if abs(off) < before["ece"] / 2:
            return f"{text}overconfident in places and underconfident in others ({chance})."
        return f"{text}{'overconfident' if off > 0 else 'underconfident'} by {abs(off):.3f} ({chance})."


@dataclass(frozen=True)
class GeneratedTexts:
    """Generated texts: their mean log-probability per token against how like their references they are.

    Args:
        measure: what likeness is, "ROUGE-L" for one
    """

    logp: NDArray[Any]
    likeness: NDArray[Any]
    coverage: Coverage
    measure: str = "ROUGE-L"

    @property
    def rank(self) -> float:
        return spearman(self.logp, self.likeness)

    @property
    def risk(self) -> str:
        """What is read off the curve of risk and coverage."""
        return self.measure.removeprefix("1 - ") if self.measure.startswith("1 - ") else f"1 - {self.measure}"


@dataclass(frozen=True)
class Calibration:
    """All that was measured.

    Args:
        parts: classes; or all tokens, those that end a sequence, and the others
        fitted: the temperature
        names, sizes: of the examples that it was fitted on, and of those that are reported
        coverage: of classes, or of generated texts
        texts: None for a classifier, and where no text was generated
    """

    parts: Sequence[CalibrationPart]
    fitted: Temperature
    names: tuple[str, str]
    sizes: tuple[int, int]
    coverage: Coverage | None
    texts: GeneratedTexts | None

    def summary(self) -> list[str]:
        """Every result as a sentence."""
        fitted, coverage, first = self.fitted, self.coverage, self.parts[0].numbers
        on, other = (f"{size} examples of {name}" for size, name in zip(self.sizes, self.names, strict=True))
        changes = [
            f"{key} {first['before'][key.lower()]:.3f} to {first['after'][key.lower()]:.3f}"
            for key in ("ECE", "Brier", "NLL")
        ]
        sentences = [
            f"Measured on {other}; the temperature is fitted on {on}.",
            *(part.verdict() for part in self.parts),
            f"Temperature {fitted.value:.3g}: {', '.join(changes)}; NLL where it was fitted {fitted.before:.3f} to "
            f"{fitted.after:.3f}.",
        ]
        if fitted.at_end:
            sentences.append(
                "The temperature is at the end of its range: the examples it was fitted on cannot tell it."
            )
        if coverage is not None:
            risk = f"risk ({self.texts.risk})" if self.texts else "error"
            sentences.append(
                f"Surest first, the area under {risk} and coverage is "
                f"{coverage.area:.3f}: {coverage.best:.3f} is the best possible, {coverage.random:.3f} a confidence "
                "that knows nothing."
            )
        if self.texts is not None:
            sentences.append(
                f"Spearman's correlation of log-probability per token and {self.texts.measure} is "
                f"{self.texts.rank:.3f}."
            )
        return sentences

    def tables(self) -> list[Table]:
        rows = [
            [part.name, when, *(int(numbers[key]) if key == "count" else float(numbers[key]) for key in COLUMNS)]
            for part in self.parts
            for when, numbers in part.numbers.items()
        ]
        tables = [Table("Calibration before and after the temperature", ["of", "when", *COLUMNS], rows)]
        if self.coverage is not None:
            measure = self.texts.measure if self.texts else ""
            title = f"Generated texts: log-probability and {measure}" if self.texts else "Risk and coverage"
            areas = {"area": self.coverage.area, "best": self.coverage.best, "knowing nothing": self.coverage.random}
            areas |= {"Spearman": self.texts.rank} if self.texts else {}
            tables.append(Table(title, list(areas), [list(areas.values())]))
        return tables

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "fitted_on": self.names[0], "measured_on": self.names[1], "examples": list(self.sizes),
            "temperature": self.fitted.value, "temperature_at_end": self.fitted.at_end,
            "parts": {part.name: part.numbers for part in self.parts},
        }  # fmt: skip
        if self.coverage is not None:
            area, best, random = self.coverage.area, self.coverage.best, self.coverage.random
            values["coverage"] = {"area": area, "best": best, "random": random}
        if self.texts is not None:
            likeness, logp = float(self.texts.likeness.mean()), float(self.texts.logp.mean())
            measure = "rougeL" if self.texts.measure == "ROUGE-L" else self.texts.measure
            values["texts"] = {"spearman": self.texts.rank, measure: likeness, "logp": logp}
        return values
