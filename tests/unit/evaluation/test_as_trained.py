"""An evaluation against a server sends the prompts of the training, token for token, for every
shipped configuration.
"""

import functools
import json

import pytest

from megatron_dcpo import rollout
from megatron_dcpo.cli.evaluate import as_trained
from megatron_dcpo.config import load_config
from megatron_dcpo.data import load_benchmark, load_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.run import EvaluationConfig, _server
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout import load_tokenizer
from tests.helpers.paths import EXAMPLES, REPOSITORY
from tests.helpers.tokenizers import save_qwen3

CONFIGS = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.name != "recipe.yaml")
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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_ids_are_those_of_the_training(path, tokenizer_of, tmp_path, monkeypatch):
    config = load_config(path)
    directory, tokenizer = tokenizer_of(config)
    file = tmp_path / "toy.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS.get(config.judging.verifier, ROWS["math"]))))
    asked = {"marker": config.judging.marker, "thinking": config.data.thinking}
    trained = load_prompts(file, tokenizer, config.data.template, **asked)

    options = as_trained(str(path), server=True)
    assert options["tokenizer"] == config.model.path
    options |= {
        "out": tmp_path,
        "endpoint": "http://localhost/v1",
        "model_name": "m",
        "tokenizer": str(directory),
    }
    monkeypatch.setattr(
        rollout, "load_tokenizer", {str(directory): tokenizer}.get
    )  # it takes seconds
    monkeypatch.setattr("megatron_dcpo.evaluation.run.token_bytes", token_bytes_once)
    _, _, render, complete = _server(EvaluationConfig(**options))
    endpoint = complete.__self__
    assert endpoint.api == "completions"
    assert endpoint.sampling.max_tokens == config.rollout.max_response_length
    sent = [endpoint._body(prompt, 0)["prompt"] for prompt in render(load_benchmark(f"toy={file}"))]
    assert sent == [list(prompt.token_ids) for prompt in trained]
    assert len(sent) == len(ROWS.get(config.judging.verifier, ROWS["math"]))
    if "qwen" in config.run_dir:
        text = tokenizer.decode(sent[0])
        assert text.endswith(
            THINKING_OFF if config.data.thinking == "off" else "<|im_start|>assistant\n"
        )
        assert text.count("<|im_start|>") == 2


def test_ids_go_to_completions_only(tmp_path):
    config = EvaluationConfig(
        out=tmp_path, endpoint="http://localhost/v1", model_name="m", tokenizer="DIR", api="chat"
    )
    with pytest.raises(UserError, match="--tokenizer sends token ids"):
        _server(config)
