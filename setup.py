"""Everything about the package is in pyproject.toml; here is what a build does besides."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithPins(build_py):
    """`dcpo doctor` names the tested versions: constraints.txt travels with the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there the checkout's own file is read
            target = Path(self.build_lib) / "megatron_dcpo" / "constraints.txt"
            self.copy_file(str(HERE / "constraints.txt"), str(target))


setup(cmdclass={"build_py": BuildWithPins})
