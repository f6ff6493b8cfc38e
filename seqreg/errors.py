"""What a user is told in one line, and the exit codes that go with it.

2: input that cannot be right (`BadInput`). 3: losses or gradients that are not finite (`NotFinite`). 4: the disk is
full or cannot be written (`DiskError`). 130, 143: stopped by SIGINT, SIGTERM (`Interrupted`).
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

DISK = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    )
)
"""What the system says of a disk that is full or cannot be written."""
NAMES = frozenset((errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.EILSEQ, errno.ENXIO))
"""What it says of a path that nothing can be read from or written to: too long, a loop of links, a device."""


class BadInput(ValueError):  # noqa: N818 - reads as what it is
    """One line that names the offending value and the fix.

    Args:
        line: the line
        more: lines of detail below it
        key, value: the setting that it is about
        fix: the line without key and value; all of it by default
    """

    code = 2

    def __init__(self, line: str, *more: str, key: str = "", value: object = None, fix: str = "") -> None:
        super().__init__("\n".join((line, *more)))
        self.lines, self.key, self.value, self.fix = (line, *more), key, value, fix or line

    def under(self, path: str, settings: Mapping[str, object]) -> tuple[str, str]:
        """The dotted key that it is about, where `settings` are those under a path, and a line that begins with it."""
        value: object = settings
        for part in self.key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return path, str(self)
            value = value[part]
        return f"{path}.{self.key}", f"{path}.{self.key}={value!r}: {self.fix}"


class MissingExtraError(BadInput, ImportError):
    """Libraries of an extra of seqreg are not installed."""


def require(extra: str, *modules: str) -> None:
    """Refuse an import whose libraries are missing, with the line that installs them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"{', '.join(missing)} not installed: pip install 'seqreg[{extra}]'")


def refuse(owner: Any, setting: str, fix: str) -> NoReturn:
    """Raise for a bad setting of something that has a name: one line that names it, its value and the fix."""
    value = getattr(owner, setting)
    raise BadInput(f"{owner.name}: {setting}={value!r}: {fix}", key=setting, value=value, fix=fix)


class Advice(UserWarning):
    """What a user should know about a term: that it does nothing, or too much."""


class Stopped(Exception):  # noqa: N818 - reads as what it is
    """A run that ends before its time: one line, and the exit code of the command."""

    code = 1

    @property
    def lines(self) -> tuple[str, ...]:
        return (str(self),)


class NotFinite(Stopped):
    """Too many steps in a row that could not be applied."""

    code = 3


class DiskError(Stopped):
    """The disk is full, or cannot be written."""

    code = 4


class Interrupted(Stopped):
    """Stopped by a signal."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or f"stopped by signal {number}")
        self.number, self.code = number, 128 + number


def yaml_hint(value: object) -> str:
    """PyYAML by itself reads 1e-5 as text: say so where a text would have been a number."""
    try:
        float(str(value))
    except ValueError:
        return ""
    return ": in YAML write 1.0e-5, not 1e-5"


def nearest(name: str, options: Iterable[str]) -> str:
    """A hint for a misspelt `name`: the closest of `options`, or all of them."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(options)}"


def check_keys(owner: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Refuse a setting that does not exist, with the nearest that does."""
    known = set(known)
    for key in given:
        if key not in known:
            raise BadInput(f"{owner}: unknown setting {key!r}; {nearest(str(key), known)}", key=str(key))
