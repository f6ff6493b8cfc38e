"""Private names of other libraries that seqreg relies on are there, take the same arguments, and are all listed."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from importlib import metadata
from pathlib import Path

import pytest
from transformers import Trainer

from seqreg.integrations.hf import private_names as names

SOURCE = inspect.getsource(Trainer)
ROOT = Path(names.__file__).parents[2]
FILES = [path for part in ("integrations/hf", "workbench") for path in sorted((ROOT / part).rglob("*.py"))]
ASSIGNED = set(re.findall(r"self\.(_\w+)\b[^=\n]*(?:: [^=\n]+)? [-+]?= ", SOURCE))


def versions() -> str:
    known = (f"{name} {metadata.version(name)} (read in {version})" for name, version in names.READ_IN.items())
    return ", ".join(known)


@pytest.mark.parametrize(("name", "parameters"), names.TRAINER_METHODS.items())
def test_a_method_takes_the_same_arguments(name: str, parameters: str) -> None:
    method = getattr(Trainer, name, None)
    assert method is not None, f"Trainer.{name} is gone: {versions()}"
    now = " ".join(list(inspect.signature(method).parameters)[1:])
    assert now == parameters, f"Trainer.{name}({now}), not ({parameters}): {versions()}"


@pytest.mark.parametrize("name", names.TRAINER_ATTRIBUTES)
def test_an_attribute_is_assigned(name: str) -> None:
    assert re.search(rf"self\.{name}\b[^=\n]* = ", SOURCE), f"Trainer.{name} is no longer assigned: {versions()}"


@pytest.mark.parametrize("name", names.FUNCTIONS)
def test_a_function_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(pkgutil.resolve_name(module), attribute), f"{name} is gone: {versions()}"


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, all in names.ASSIGNED.items() for name in all])
def test_an_attribute_of_another_class_is_assigned(owner: str, name: str) -> None:
    source = inspect.getsource(pkgutil.resolve_name(owner))
    assert re.search(rf"(self\.|^    ){name}\b[^=\n]*( = |: )", source, re.MULTILINE), f"{owner}.{name}: {versions()}"


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, all in names.FOUND_ON.items() for name in all])
def test_an_attribute_is_found(owner: str, name: str) -> None:
    made = pkgutil.resolve_name(owner)
    made = made() if owner in ("torch.nn.Module", "torch.Tensor") else made
    assert hasattr(made, name), f"{owner}.{name} is gone: {versions()}"


def used(path: Path) -> set[str]:
    """Private names that a file defines or takes from `self`, `super()` or a trainer."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()", "trainer"):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_private_name_of_the_trainer_is_listed(path: Path) -> None:
    theirs = {name for name in used(path) if hasattr(Trainer, name) or name in ASSIGNED}
    listed = {*names.TRAINER_METHODS, *names.TRAINER_ATTRIBUTES}
    assert theirs <= listed, f"{path}: list {', '.join(sorted(theirs - listed))} in {names.__name__}"


HERE = [path for part in ("engines", "integrations/hf") for path in sorted((ROOT / part).rglob("*.py"))]
OTHERS = {name for listed in (names.ASSIGNED, names.FOUND_ON) for several in listed.values() for name in several}


@pytest.mark.parametrize("path", HERE, ids=[str(path.relative_to(ROOT)) for path in HERE])
def test_every_private_name_of_other_classes_is_listed(path: Path) -> None:
    """Of what is not this package's own: attributes of anything but `self`, and names that no class here defines."""
    tree = ast.parse(path.read_text())
    theirs = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    own = {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for each in HERE + FILES
        for node in ast.walk(ast.parse(each.read_text()))
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()", "cls", "trainer"))
    }
    listed = {*OTHERS, *names.MARKS, *names.SFT_ATTRIBUTES, *names.TRAINER_METHODS, *names.TRAINER_ATTRIBUTES}
    assert theirs - own <= listed, f"{path}: list {', '.join(sorted(theirs - own - listed))} in {names.__name__}"


def test_no_name_is_listed_in_vain() -> None:
    text = "\n".join(path.read_text() for path in {*HERE, *FILES} if path != Path(names.__file__))
    assert [name for name in (*OTHERS, *names.MARKS) if name not in text] == []
    assert [name for name in (*names.TRAINER_METHODS, *names.TRAINER_ATTRIBUTES) if name not in text] == []
