"""What a language model says it knows: stated, looked up, fitted and taught confidences of frozen
policies of SmolLM2-135M-Instruct. The study is ``docs/lab/language_model.md``.
"""

from __future__ import annotations

from lab.confidences import ADAPTERS, SHUFFLED, Study

TAUGHT = "adapter, taught by the stack"
STUDY = Study(
    name="language_model",
    verb="language-model",
    title="a language model says what it knows",
    compared=(
        *(name for name in ADAPTERS if name != SHUFFLED),
        f"{TAUGHT}, greedy",
        "probe",
        "stack",
        "boosted trees",
    ),
    against=("lookup", "bar", "adapter, T = R", "probe", TAUGHT),
    tests=("test", "other"),
    said="said_test",
)
