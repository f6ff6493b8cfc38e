"""A comparison as Markdown, for papers and pull requests, and its tables in LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence

from seqreg.studies.common.findings import Finding, Table
from seqreg.studies.common.markdown import cell, markdown_table, numeric
from seqreg.workbench.text.escape import fenced, plain, prose

Named = Sequence[tuple[str, Finding]]

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}", "*": "{*}",  # after the \\ of the row above they would be read as its options
}  # fmt: skip


def markdown_page(finding: Finding, others: Named, commands: Sequence[str]) -> str:
    """Verdict, tables, other findings, and the commands."""
    parts = [f"## {prose(finding.title)}", *_findings(finding)]
    for about, other in others:
        parts += [f"### {prose(other.title)} ({prose(about)})", *_findings(other)]
    parts += ["### To repeat it", fenced("\n".join(map(plain, commands)), "bash")]
    return "\n\n".join(parts) + "\n"


def _findings(finding: Finding) -> list[str]:
    sentences = "\n".join(f"- {prose(sentence)}" for sentence in finding.summary)
    return [sentences, *(f"**{prose(table.title)}**\n\n{markdown_table(table)}" for table in finding.tables)]


def latex_page(finding: Finding, others: Named) -> str:
    """All tables, each in an environment of its own; needs no package."""
    tables = [("", table) for table in finding.tables]
    tables += [(f" ({about})", table) for about, other in others for table in other.tables]
    note = f"% {plain(finding.command)}"
    return "\n\n".join([note, *(latex_table(table, about) for about, table in tables)]) + "\n"


def latex_table(table: Table, about: str = "") -> str:
    """One table with its caption."""
    rows = [" & ".join(latex(cell(value)) for value in row) + r" \\" for row in table.rows]
    head = " & ".join(latex(name) for name in table.columns) + r" \\"
    columns = "".join("r" if right else "l" for right in numeric(table))
    return "\n".join(
        [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{columns}}}", r"\hline", head, r"\hline", *rows,
         r"\hline", r"\end{tabular}", rf"\caption{{{latex(table.title + about)}}}", r"\end{table}"]
    )  # fmt: skip


def latex(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> print(latex("50% of a_b"))
    50\% of a\_b
    """
    return re.sub(r"[\\&%$#_{}~^<>\[*]", lambda match: _LATEX[match.group()], plain(text))
