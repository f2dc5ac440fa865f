"""An evaluation against a server sends the prompts of the training, token for token, for every
shipped configuration.
"""

import functools
import json

import numpy as np
import pytest

from megatron_dcpo.config import JudgingConfig, load_config
from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.data.datasets import PromptOptions, load_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.problems import load_problems
from megatron_dcpo.evaluation.responders import ask_server
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout import tokens
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.runtime.run_records import today
from megatron_dcpo.types import Prompt, Response
from tests.helpers.paths import EXAMPLES, REPOSITORY
from tests.helpers.shipped import SHIPPED
from tests.helpers.tokenizers import save_qwen3

ROWS = {
    "math": [
        {"problem": "What is 2+2?", "answer": "4"},
        {"problem": "Find $x$: $x^2=9$, $x>0$.", "answer": "3"},
    ],
    "code": [
        {
            "problem": "Add two numbers.",
            "tests": {"kind": "stdin", "cases": [{"input": "1 2", "output": "3"}]},
        }
    ],
}


token_bytes_once = functools.cache(token_bytes)  # as it does
THINKING_OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """(directory, tokenizer) of a configuration: the quickstart's, or Qwen's with the end of
    Qwen3's chat template.
    """
    kept = {}

    def get(config):
        if "llama" in config.run_dir:
            pytest.skip("the tokenizer of Llama-3.1 is gated and not among the real data")
        qwen = (
            "qwen" in config.run_dir or config.data.template == "chat"
        )  # the quickstart's has no chat template
        if qwen not in kept:
            directory = REPOSITORY / "examples" / "quickstart" / "policy"
            if qwen:
                directory = save_qwen3(tmp_path_factory.mktemp("qwen"))
            kept[qwen] = directory, load_tokenizer(directory)
        return kept[qwen]

    return get


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_ids_are_those_of_the_training(path, tokenizer_of, tmp_path, monkeypatch):
    config = load_config(path)
    directory, tokenizer = tokenizer_of(config)
    file = tmp_path / "toy.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS.get(config.judging.verifier, ROWS["math"]))))
    options = PromptOptions(
        config.data.template, marker=config.judging.marker, thinking=config.data.thinking
    )
    trained = load_prompts(file, tokenizer, options)

    server = {"endpoint.url": "http://localhost/v1", "endpoint.model": "m", "run_dir": "r"}
    asked_for = load_evaluation(server, as_trained=str(path))
    assert asked_for.endpoint.tokenizer == config.model.path
    own = {"endpoint.tokenizer": str(directory)}
    evaluated = load_evaluation(server | own, as_trained=str(path))
    assert evaluated.judging == config.judging
    # it takes seconds
    monkeypatch.setattr(tokens, "load_tokenizer", {str(directory): tokenizer}.get)
    monkeypatch.setattr("megatron_dcpo.evaluation.responders.token_bytes", token_bytes_once)
    responder = ask_server(evaluated, today())
    endpoint = responder.respond.__self__
    assert endpoint.api == "completions"
    assert endpoint.sampling.max_tokens == config.rollout.max_response_length
    (problems,) = load_problems(f"toy={file}", JudgingConfig())
    sent = [endpoint._body(prompt, 0)["prompt"] for prompt in responder.render(problems)]
    assert sent == [list(prompt.token_ids) for prompt in trained]
    assert len(sent) == len(ROWS.get(config.judging.verifier, ROWS["math"]))
    if "qwen" in config.run_dir:
        text = tokenizer.decode(sent[0])
        assert text.endswith(
            THINKING_OFF if config.data.thinking == "off" else "<|im_start|>assistant\n"
        )
        assert text.count("<|im_start|>") == 2


def test_ids_go_to_completions_only():
    with pytest.raises(UserError, match=r"endpoint\.tokenizer"):
        load_evaluation(
            {
                "run_dir": "r",
                "endpoint.url": "http://localhost/v1",
                "endpoint.tokenizer": "DIR",
                "endpoint.api": "chat",
            }
        )


JUDGED = {
    "verifier": "exact",
    "threshold": 0.5,
    "test_seconds": 30.0,
    "program_seconds": 90.0,
    "memory_mb": 2048,
    "sandbox": "landlock",
    "max_error_rate": 0.5,
    "marker": "<sure>",
}


def test_judging_and_sources_are_those_of_the_run(tmp_path):
    """By name or by path; the rest of the data is the evaluation's own."""
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.jsonl").write_text('{"problem": "2+2?", "answer": "4"}\n')
    (tmp_path / "mine.py").write_text("def render(problem, marker):\n    return problem\n")
    sources = [
        {"path": str(tmp_path / "one.jsonl"), "name": "first", "verifier": "f1"},
        {"path": str(tmp_path / "two.jsonl"), "template": f"{tmp_path}/mine.py:render"},
        {"path": str(tmp_path / "three.jsonl")},
    ]
    run = {"run_dir": "r", "model": {"path": "m"}, "judging": JUDGED}
    run["data"] = {"path": sources, "thinking": "auto", "prompts_per_step": 8}
    (tmp_path / "config.yaml").write_text(json.dumps(run))
    config = load_evaluation(
        {"run_dir": "e", "model.path": "other"}, as_trained=str(tmp_path / "config.yaml")
    )
    for name, value in JUDGED.items():
        assert getattr(config.judging, name) == value, name
    assert config.data.thinking == "auto"
    assert config.model.path == "other"
    three = tmp_path / "three.jsonl"
    benchmarks = f"first={three},again={tmp_path}/two.jsonl,math={three}"
    loaded = load_problems(benchmarks, config.judging, config.data.sources)
    half_right = Response("p", 0, np.empty(0), np.empty(0), "stop", 0, text="\\boxed{4 more}")
    found = {}
    for one in loaded:
        asked = {"p": Prompt("p", (), (), "4", "t", row={"answer": ["4"]}, form="short")}
        found[one.benchmark.name] = (one.judge([half_right], asked)[0].correct, one.template)
    mine = f"{tmp_path}/mine.py:render"
    assert found == {"first": (1.0, None), "again": (0.0, mine), "math": (0.0, None)}
