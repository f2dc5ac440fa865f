"""Every parser of text that others write, on text that nobody meant: ``make fuzz`` at length, the
suite for seconds.

The property of each: only its documented error, never another; and what comes out can be written as
UTF-8. Past finds stand as examples.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_dcpo.architectures.config_json import parse_architecture
from megatron_dcpo.checkpoints.manifest import MANIFEST, listed_files
from megatron_dcpo.config import JudgingConfig, load_config
from megatron_dcpo.conversion import megatron_checkpoint
from megatron_dcpo.conversion.checkpoint_metadata import METADATA, read_metadata
from megatron_dcpo.data.datasets import load_records
from megatron_dcpo.data.row_files import read_json_lines, read_rows
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.evaluation.scoring import CONFIDENCE_KINDS, score_samples
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.questions import question_verifier
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.judging.verifiers import check_problems
from megatron_dcpo.objectives import worksheet
from megatron_dcpo.rollout.engine import SamplingConfig
from megatron_dcpo.rollout.openai_client import Endpoint
from megatron_dcpo.runtime.http_json import JsonClient
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.types import Prompt
from megatron_dcpo.weights.hf_checkpoint import HFReader
from tests.fuzz.strategies import changed, fuzz, mutated, only, values
from tests.helpers.evaluated import A_SAMPLE
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import byte_level

# ------------------------------------------------------------------------------ what data sets hold

PRIVATE = base64.b64encode(zlib.compress(pickle.dumps('[{"input": "1", "output": "1"}]'))).decode()
ROWS = [
    {"problem": "1+1", "answer": "2"},
    {"question": "?", "answer": 2.0, "data_source": "aime"},
    {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "#### 1,000"}},
    {
        "question_content": "?",
        "public_test_cases": '[{"input": "1", "output": "2"}]',
        "private_test_cases": PRIVATE,
    },
    {
        "prompt": "def f(x):",
        "task_id": "HumanEval/0",
        "entry_point": "f",
        "test": "def check(c):\n assert c(1) == 1",
    },
    {"problem": "?", "tests": '{"inputs": ["1"], "outputs": ["2"]}'},
    {
        "problem": "?",
        "tests": {"kind": "stdin", "cases": [{"input": "1", "output": "2"}], "atol": 0.1},
    },
    {"question": "?", "options": ["a", "b"], "answer": "B", "answer_index": 1, "category": "c"},
    {
        "Question": "?",
        "Correct Answer": "1",
        **{f"Incorrect Answer {n}": str(n) for n in (1, 2, 3)},
        "Subdomain": "s",
    },
    {"question": "?", "answer": {"value": "a", "aliases": ["b"], "normalized_aliases": ["b"]}},
    {"Data": [{"Question": "?", "Answer": {"Value": "a", "Aliases": ["b"]}}]},
    {"question": "?", "answer": "a", "supporting_facts": [["t", 0]], "context": [["t", ["c"]]]},
]
DEEPER = {
    "role",
    "content",
    "ground_truth",
    "kind",
    "cases",
    "atol",
    "input",
    "output",
    "inputs",
    "outputs",
    "fn_name",
}
NAMES = sorted(
    {key for row in ROWS for key in row}
    | DEEPER
    | {"testtype", "func_name", "metadata", "value", "aliases", "Value"}
)


@fuzz
@given(
    row=st.sampled_from(ROWS).flatmap(lambda row: changed(row, NAMES)),
    garbage=st.booleans(),
    data=st.data(),
)
@example(
    row={"problem": "?", "answer": "1" * 5000, "data_source": "aime"}, garbage=False, data=None
)
def test_data_sets(
    tmp_path_factory: pytest.TempPathFactory, row: Any, garbage: bool, data: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    line = json.dumps(row).encode() + b"\n"
    path.write_bytes(data.draw(mutated(line)) if garbage else line)
    only(UserError, lambda: [encoded(row) for _, row in read_json_lines(path)])
    records = only(UserError, lambda: load_records(path)) or []
    for record in records:
        (record.answer + record.problem + record.prompt_id).encode()
        encoded(record.row)
        for name in ("exact", "f1", "choice"):
            only(UserError, partial(check_problems, name, [record], "rows"))
            attempt = Attempt("B", record.answer, "", record.row)
            assert question_verifier(name, JudgingConfig())([attempt])[0].correct in (True, False)


TABLE = b'problem,answer\r\n"What, is\n""1+1""?",2\r\nx,y\r\n'


@fuzz
@given(table=mutated(TABLE) | st.binary(max_size=60))
@example(table=b"a,b\n" + b"x" * 200_000 + b",1\n")
@example(table=b"a,a\r1,\0\r")
def test_tables(tmp_path_factory: pytest.TempPathFactory, table: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    path.write_bytes(table)
    for row in only(UserError, lambda: list(read_rows(path))) or []:
        encoded(row)
    for record in only(UserError, lambda: load_records(path)) or []:
        (record.answer + record.problem + record.prompt_id).encode()


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


SAMPLE = A_SAMPLE | {
    "row": {"answer": 5},
    "segments": [[0, 2], [1, 1]],
    "top_logprobs": [0.5],
    "token_confidence": 0.5,
    "min_logprob": -1.0,
    "mean_entropy": 0.5,
    "features": [0.5],
}


@fuzz
@given(row=changed(SAMPLE, list(SAMPLE)))
@example(row=SAMPLE | {"version": True})
@example(row=SAMPLE | {"length": -1, "token_confidence": 0.0})
@example(row=SAMPLE | {"min_logprob": 1e6})
@example(row=SAMPLE | {"confidence": 10**400})
def test_samples_of_others_are_read_or_refused_and_what_is_read_is_scored(
    tmp_path_factory: pytest.TempPathFactory, row: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "samples.jsonl"
    path.write_text(json.dumps(row) + "\n")
    for sample in only(UserError, lambda: read_samples(path)) or []:
        scores = score_samples(
            [sample], tuple(kind for kind in CONFIDENCE_KINDS if kind != "posthoc"), resamples=2
        )
        encoded(scores)


@fuzz
@given(
    text=st.binary(max_size=60)
    | mutated(b'{"a": [1, "\\ud83d\\ude00", null, {"b": -1e5}], "c": "\\n"}')
)
@example(text=b"[" * 200)
@example(text=b"[" * 10**5)
@example(text=b"1" * 5000)
@example(text=b'"\\ud800"')
def test_json_of_any_bytes_is_read_or_refused_in_one_line(text: bytes) -> None:
    value = only(ValueError, lambda: parse_json(text))
    encoded(value)


# ------------------------------------------------------------------------------- what servers reply

CHAT = {
    "choices": [
        {
            "message": {"content": "x"},
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {"logprob": -1.0, "top_logprobs": [{"logprob": -1.0}, {"logprob": -2.0}]}
                ]
            },
        }
    ]
}
PLAIN = {
    "choices": [
        {
            "text": "x",
            "logprobs": {"token_logprobs": [-1.0, None], "top_logprobs": [{"a": -1.0}, None]},
        }
    ]
}
WORDS = [
    "choices",
    "message",
    "content",
    "text",
    "logprobs",
    "logprob",
    "top_logprobs",
    "token_logprobs",
]


@fuzz
@given(
    reply=st.sampled_from([CHAT, PLAIN]).flatmap(lambda reply: changed(reply, WORDS))
    | values(WORDS),
    api=st.sampled_from(["chat", "completions"]),
)
def test_replies_of_servers(reply: Any, api: Any) -> None:
    endpoint = Endpoint("http://server", "m", SamplingConfig(top_logprobs=2), api=api, attempts=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JsonClient, "_once", lambda *_: parse_json(json.dumps(reply)))
        response = only(
            UserError,
            lambda: endpoint.ask(Prompt("p", ({"role": "user", "content": "?"},), (), "", ""), 0),
        )
    if response is not None:
        response.text.encode()
        assert response.logprobs.ndim == 1
        assert np.isfinite(response.logprobs).all()
        assert response.top_logprobs is None or np.isfinite(response.top_logprobs).all()


# --------------------------------------------------------------------------- models and checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    chunk = megatron_checkpoint.NewChunk(
        "a", (4, 3), (0, 0), (4, 3), "float32", lambda: torch.ones(4, 3)
    )
    megatron_checkpoint.write_checkpoint(directory, [chunk], {"b": None}, lambda nbytes: None)
    (directory / "honest").write_bytes((directory / METADATA).read_bytes())
    return directory


NAMED = [
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ctorch\nSize\n",
    b"ctorch\nfloat32\n",
    b"U\x01a",
    b"K\x01",
]
OPCODES = st.sampled_from(
    [*(bytes([code]) for code in range(256)), *NAMED, b"(", b"t", b"R", b"}", b"b"]
)


@fuzz
@given(data=st.data())
def test_checkpoint_metadata(checkpoint: Path, data: Any) -> None:
    honest = (checkpoint / "honest").read_bytes()
    programs = st.lists(OPCODES, max_size=20).map(
        lambda codes: b"\x80\x02" + b"".join(codes) + b"."
    )
    (checkpoint / METADATA).write_bytes(data.draw(mutated(honest) | programs))
    if only(UserError, lambda: read_metadata(checkpoint)) is not None:
        only(UserError, lambda: megatron_checkpoint.MegatronCheckpoint(checkpoint))


@fuzz
@given(
    header=changed(
        {
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        },
        ["dtype", "shape", "data_offsets", "a", "__metadata__"],
    ),
    garbage=st.booleans(),
    data=st.data(),
)
def test_safetensors_headers(
    tmp_path_factory: pytest.TempPathFactory, header: Any, garbage: bool, data: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "safetensors" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(32)
    path.write_bytes(data.draw(mutated(content)) if garbage else content)
    reader = only(UserError, lambda: HFReader(path.parent))
    for name, (shape, _) in (reader.specs if reader else {}).items():
        assert all(size >= 0 for size in shape)
        tensor = reader.tensor(name)
        assert tensor.numel() == math.prod(shape)
        tensor.clone()


@fuzz
@given(data=st.data())
def test_tokenizers(data: Any) -> None:
    spec = json.loads(byte_level().to_str())
    small = spec | {
        "model": spec["model"]
        | {"vocab": dict(list(spec["model"]["vocab"].items())[:20]), "merges": []}
    }
    keys = ["id", "content", "type", "vocab", "decoder", "added_tokens", "model"]
    chosen = data.draw(changed(small, keys))
    try:
        tokenizer = Tokenizer.from_str(json.dumps(chosen))
    except Exception:  # the library's own refusal, which load_tokenizer turns into a UserError
        return
    table = only(UserError, lambda: token_bytes(tokenizer))
    assert table is None or all(isinstance(piece, bytes) for piece in table.table)


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@fuzz
@given(config=changed(CONFIG, list(CONFIG)))
def test_model_configurations(config: dict[str, Any]) -> None:
    only(UserError, lambda: parse_architecture(config))


@fuzz
@given(
    text=mutated(
        json.dumps({"iteration": 7, "files": {"common.pt": {"bytes": 1, "sha256": "a"}}}).encode()
    )
)
@example(text=json.dumps({"iteration": 7, "files": {"../x": {"bytes": 1, "sha256": "a"}}}).encode())
def test_manifests(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    directory = tmp_path_factory.getbasetemp()
    (directory / MANIFEST).write_bytes(text)
    files = only(ValueError, lambda: listed_files(directory, 7))
    assert not files or not any("/" in name or name in (".", "..") for name in files)


# ----------------------------------------------------------------------------------- configurations

YAML = (QUICKSTART / "dcpo.yaml").read_bytes()


@fuzz
@given(text=mutated(YAML))
@example(text=b"a: " + b"[" * 5000)
@example(text=b"base: [1]\n" + YAML)
@example(text=b"\xff" + YAML)
@example(text=b'run_dir: "${run_dir}"\n')
def test_yaml_configurations(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_bytes(text)
    only(UserError, lambda: load_config(path))


GROUP = {
    "method": "dcpo",
    "options": {"lam": 0.5},
    "responses": [
        {
            "prompt_id": "p",
            "correct": right,
            "confidence": 0.5,
            "status": "ok",
            "boundary": 2,
            "length": 3,
            "old_logprobs": [-1.0, -1.0, -1.0],
            "logprobs": [-1.0, -1.0, -1.0],
        }
        for right in (0, 1)
    ],
}


@fuzz
@given(group=changed(GROUP, [*GROUP, *GROUP["responses"][0]]))  # type: ignore[dict-item]
@example(group=GROUP | {"method": []})
def test_groups_of_responses(group: Any) -> None:
    if isinstance(group, dict):
        only(UserError, lambda: worksheet.evaluate(group))


def test_the_reader_of_metadata_is_not_the_one_that_runs_code() -> None:
    """What the fuzzing relies on: a payload that would run does run where it is let."""
    ran: list[int] = []

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, ("raise KeyError('ran')",))

    with pytest.raises(KeyError, match="ran"):
        pickle.load(io.BytesIO(pickle.dumps(Payload())))
    assert not ran
