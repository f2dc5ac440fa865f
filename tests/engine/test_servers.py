"""Server mode as it is shipped: ``dcpo launch --engines`` starts ``vllm serve``, training asks it.
Needs vLLM; minutes, so ``make test-engine`` only.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.rollout import vllm_server
from megatron_dcpo.rollout.engine import SamplingConfig
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.training.served_teacher import ServedTeacher
from megatron_dcpo.types import Prompt, Response, TokenSequence
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import hf_shapes
from tests.engine.test_training import CONFIG, ENGINE, metrics, train
from tests.helpers.paths import REPOSITORY
from tests.helpers.samplers import one_rank
from tests.helpers.vllm import POLICY, at_length, needs_vllm
from tests.unit.rollout.test_serving import free_port

pytestmark = [needs_vllm, at_length, pytest.mark.timeout(1800)]

SERVED = [
    *[option for option in ENGINE if not option.startswith("rollout.")],
    "rollout.engine=server",
    "rollout.group_size=4",
    "rollout.max_num_seqs=32",
]
NO_WAY = "http://127.0.0.1:9"  # a proxy that knows no host of the job


def launch(processes: int, engines: int, run_dir: Path, *options: str) -> subprocess.Popen[str]:
    """``dcpo launch``, with a proxy in its environment."""
    command = [sys.executable, "-m", "megatron_dcpo", "launch", str(processes)]
    if engines:
        command += ["--engines", str(engines)]
    command += ["--", "train", "--config", str(CONFIG), f"run_dir={run_dir}"]
    return subprocess.Popen(
        [*command, *SERVED, *options],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "http_proxy": NO_WAY,
            "HTTP_PROXY": NO_WAY,
        },
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(
    engines: int, run_dir: Path, endpoint: str, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """A launcher that starts nothing but a server, as on a node of engines."""
    launcher = launch(0, engines, run_dir, f"rollout.endpoint={endpoint}", *options)
    try:
        yield launcher
    finally:
        launcher.terminate()
        launcher.wait(60)


def server_of(launcher: subprocess.Popen[str]) -> psutil.Process:
    """The process of ``vllm serve``, once there is one."""
    until(lambda: bool(psutil.Process(launcher.pid).children()), launcher)
    return psutil.Process(launcher.pid).children()[0]


def until(true: Callable[[], bool], *running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while not true():
        for process in running:
            assert process.poll() is None, (process.stderr or sys.stdin).read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def address() -> str:
    return f"http://127.0.0.1:{free_port()}/v1"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return train(tmp_path_factory.mktemp("alone") / "run", *ENGINE)


def check(records: list[dict[str, float]], alone: list[dict[str, float]]) -> None:
    """The same seeds, the same responses as with the embedded engine."""
    for ours, single in zip(records, alone, strict=True):
        assert ours["engine/logprob_diff_max"] <= 1e-4
        assert ours["reward/accuracy"] == single["reward/accuracy"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_server_of_two_workers(alone: list[dict[str, float]], tmp_path: Path, size: int) -> None:
    """Two engines with an API server each, whose weights have one version; one engine of two."""
    options = [f"rollout.tensor_model_parallel_size={size}", f"rollout.endpoint={address()}"]
    run = launch(2, 2, tmp_path / "run", *options)
    _, said = run.communicate(timeout=900)
    assert run.returncode == 0, said[-4000:]
    check(metrics(tmp_path / "run"), alone)
    log = (tmp_path / "run" / "engines.log").read_text()
    asked = set(re.findall(r"\((ApiServer_\d|APIServer) pid=\d+\) .*completions", log))
    assert len(asked) == 3 - size


def test_two_servers_of_which_one_comes_late_and_one_is_killed(
    alone: list[dict[str, float]], tmp_path: Path
) -> None:
    """Two trainers, a server each. One begins a minute after them; the other one is killed in a
    rollout, and its launcher starts it again.
    """
    first, second = address(), address()
    run_dir = tmp_path / "run"
    with serving(1, tmp_path / "first", first) as of_first:
        run = launch(2, 0, run_dir, f"rollout.endpoint={first},{second}")
        time.sleep(60)
        assert run.poll() is None, run.communicate()[1][-3000:]
        with serving(1, tmp_path / "second", second):
            until(lambda: len(metrics(run_dir)) >= 1, run)
            killed = server_of(of_first)
            with suppress(ProcessLookupError):
                os.killpg(killed.pid, signal.SIGKILL)
            _, said = run.communicate(timeout=900)
            assert run.returncode == 0, said[-4000:]
            assert server_of(of_first).pid != killed.pid
    assert f"waiting for a server at {second.removesuffix('/v1')}" in said
    assert "every engine is restarted" in said
    check(metrics(run_dir), alone)


def test_a_stop_withdraws_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers of two engines have nothing to do any more."""
    endpoint = address()
    base = endpoint.removesuffix("/v1")
    with serving(2, tmp_path / "server", endpoint) as launcher:
        until(lambda: is_there(base), launcher)
        engine = ServerEngine([endpoint], POLICY, tmp_path / "exchange")
        engine.weights_version = "default"  # type: ignore[assignment]
        engine.eos_token_ids = ()  # every response has its full length
        prompts = [Prompt(str(number), (), (5, number), "", "") for number in range(64)]
        looks = iter(range(10**6))
        monkeypatch.setattr(vllm_server, "stop_requested", lambda: next(looks) > 2)
        began = time.monotonic()
        with pytest.raises(RolloutAbandoned):
            engine.generate(prompts, SamplingConfig(n=8, max_tokens=30))
        assert time.monotonic() - began < 10
        until(lambda: figure(base, "num_requests_(?:running|waiting)") == 0)
        sampled = figure(base, "generation_tokens_total")
        time.sleep(3)
        assert figure(base, "generation_tokens_total") == sampled
        assert 0 < sampled < 64 * 8 * 30


def is_there(base: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(f"{base}/health", timeout=5).close()
        return True
    return False


def figure(base: str, name: str) -> float:
    """One of vLLM's figures, of all engines together."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=20) as reply:
        lines = reply.read().decode()
    found = re.findall(rf"^vllm:{name}\{{.* (\S+)$", lines, re.M)
    return sum(map(float, found))


def test_weights_that_arrive_continue_what_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's pause returns what it has sampled; each part has the log-probs of its version."""
    monkeypatch.setattr(distributed, "topology", lambda: SimpleNamespace(rank=0))
    endpoint = address()
    base = endpoint.removesuffix("/v1")
    exchange = tmp_path / "exchange"
    long = "rollout.max_response_length=200"
    with one_rank(), serving(1, tmp_path / "server", endpoint, long) as launcher:
        until(lambda: is_there(base), launcher)
        engine = ServerEngine([endpoint], POLICY, exchange)
        engine.update_weights(weights(factor=1.0), version=1)
        engine.eos_token_ids = ()  # every response has its full length
        prompts = [Prompt(str(number), (), (5, number), "", "") for number in range(1, 9)]
        samples = [(prompt, index) for prompt in prompts for index in range(4)]
        responses: list[Response] = []

        def sample() -> None:
            for together in engine.stream(samples, SamplingConfig(max_tokens=200)):
                responses.extend(together)

        rollout = threading.Thread(target=sample)
        rollout.start()
        until(lambda: figure(base, "generation_tokens_total") > 64, launcher)
        engine.update_weights(weights(factor=2.0), version=2)
        rollout.join(300)
        assert not rollout.is_alive()
    assert len({response.key for response in responses}) == len(samples)
    assert {len(response.token_ids) for response in responses} == {200}
    assert any(len(response.versions) == 2 for response in responses)
    models = {1: model_of(factor=1.0), 2: model_of(factor=2.0)}
    for response in responses:
        prompt = next(one for one in prompts if one.prompt_id == response.prompt_id)
        start = 0
        for version, tokens in response.versions:
            expected = logprobs_of(models[version], prompt, response.token_ids)
            part = slice(start, start + tokens)
            np.testing.assert_allclose(response.logprobs[part], expected[part], atol=1e-3)
            start += tokens


def weights(factor: float) -> list[list[WeightSlice]]:
    """The policy with a norm of ``factor`` times the weight, a tensor a bucket."""
    buckets = []
    for name, tensor in model_of(factor).state_dict().items():
        if name in hf_shapes(read_architecture(POLICY)):
            buckets.append([WeightSlice(name, 0, 0, tensor)])
    return buckets


def model_of(factor: float) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    model.model.norm.weight.data *= factor
    return model.eval()


def logprobs_of(model: torch.nn.Module, prompt: Prompt, tokens: np.ndarray) -> torch.Tensor:
    """The log-probs of a response's tokens, in one pass."""
    ids = torch.tensor([[*prompt.token_ids, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_a_teacher_behind_vllm_says_what_transformers_says(tmp_path: Path) -> None:
    endpoint = address()
    base = endpoint.removesuffix("/v1")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", POLICY),
        *("--dtype", "float32"),
        *("--port", base.rpartition(":")[2], "--max-model-len", "256"),
    ]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = subprocess.Popen(list(map(str, command)), env=os.environ | environment)
    try:
        until(lambda: is_there(base), server)
        teacher = ServedTeacher.before_a_run(endpoint)
        teacher.check(len(tokenizer), lambda ids: str(tokenizer.decode(ids)))
        assert teacher.positions() == 256
        model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
        for length in (2, 40, 255):
            ids = np.random.default_rng(length).integers(0, len(tokenizer), length)
            with torch.no_grad():
                logits = model(torch.tensor(ids)[None]).logits[0]
            expected = logits.log_softmax(-1)[np.arange(length - 1), ids[1:]]
            found = teacher.read(TokenSequence(ids, np.arange(length - 1)))
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)
    finally:
        server.terminate()
        server.wait(60)
