"""Puts recipes/ and tasks/ into the wheel, as seqreg/recipes and seqreg/tasks; everything else is in setup.cfg."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """An editable install finds recipes and task cards in the clone; a wheel needs them inside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in [path for kind in ("recipes", "tasks") for path in Path(kind).rglob("*.yaml")]:
                target = Path(self.build_lib, "seqreg", path)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithRecipes})
