"""From data files to prompts: loaders, prompt templates, the benchmark registry."""

from megatron_dcpo.data.benchmarks import BENCHMARKS, LoadedBenchmark, load_benchmark
from megatron_dcpo.data.datasets import Record, load_prompts, load_records, render_prompts
from megatron_dcpo.data.prompts import TEMPLATES, render

__all__ = [
    "BENCHMARKS",
    "TEMPLATES",
    "LoadedBenchmark",
    "Record",
    "load_benchmark",
    "load_prompts",
    "load_records",
    "render",
    "render_prompts",
]
