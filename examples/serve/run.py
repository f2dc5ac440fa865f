"""The quickstart's policy with a calibrated confidence, on a laptop: ``make serve``.

    python examples/serve/run.py [--model DIR] [--out runs/serve] [--port 8100]

Samples the policy on training problems and fits a confidence (a minute, once: what is in --out is
kept), starts the policy behind an OpenAI-compatible server (server.py) and ``dcpo serve`` in front
of it. Open http://127.0.0.1:8100 and ask it 58*2=. Ctrl-C ends both. With --ask it prints the
answers and confidences of some questions instead, and ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from megatron_dcpo.rollout.tokens import load_tokenizer

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
DCPO = (sys.executable, "-m", "megatron_dcpo")
# as the policy was trained; the problem alone, which the quickstart's policy is asked with
SAMPLING = (
    "--template raw --temperature 1.0 --top-p 1.0 --top-k 0 --max-tokens 32 "
    "--batch-size 512 --engine transformers --resamples 0"
)
_START_SECONDS = 120


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(QUICKSTART / "policy"))
    parser.add_argument("--problems", type=int, default=300, help="to fit on")
    parser.add_argument("--out", type=Path, default=Path("runs/serve"))
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--upstream-port", type=int, default=8101)
    parser.add_argument("--ask", action="append", default=[], metavar="QUESTION")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of what is asked; as the confidence's fit"
    )
    args = parser.parse_args(argv)
    confidence = args.out / "confidence.npz"
    if not confidence.exists():
        fit(args.model, args.problems, args.out, confidence)
    address = ("--port", str(args.upstream_port))
    server = [sys.executable, str(HERE / "server.py"), "--model", args.model, *address]
    endpoint = f"http://127.0.0.1:{args.upstream_port}/v1"
    given = ("--endpoint", endpoint, "--calibrator", str(confidence))
    with subprocess.Popen(server) as upstream:
        try:
            wait_for(endpoint, upstream)
            proxy = [*DCPO, "serve", *given, "--port", str(args.port), "--example", "58*2="]
            if args.ask:
                is_chat = load_tokenizer(args.model).chat_template is not None
                sampling = {"temperature": args.temperature, "max_tokens": 48}
                url = f"http://127.0.0.1:{args.port}/v1"
                return ask(proxy, url, args.ask, sampling, is_chat=is_chat)
            print(f"open http://127.0.0.1:{args.port} and ask 58*2=", flush=True)
            with suppress(KeyboardInterrupt):
                return subprocess.run(proxy, check=False).returncode
            return 0
        finally:
            upstream.terminate()


def fit(model: str, problems: int, out: Path, confidence: Path) -> None:
    """Sample the model on training problems, and fit a confidence."""
    data = f"fit={QUICKSTART / 'data' / 'train.jsonl'}"
    asked = ["--benchmarks", data, "--limit", str(problems), "--repeats", "4"]
    evaluate = ["evaluate", "--model", model, *asked, "--out", str(out / "fit")]
    subprocess.run([*DCPO, *evaluate, *SAMPLING.split()], check=True)
    samples = str(out / "fit" / "samples.jsonl")
    calibrate = ["calibrate", "--samples", samples, "--out", str(confidence)]
    subprocess.run([*DCPO, *calibrate], check=True)


def ask(
    proxy: Sequence[str],
    address: str,
    questions: Sequence[str],
    sampling: Mapping[str, float],
    *,
    is_chat: bool,
) -> int:
    """Start ``dcpo serve``, print the answer to each question with its confidence, and stop it.
    Return 0. A model without a chat template is asked for a completion.
    """
    with subprocess.Popen(proxy) as server:
        try:
            wait_for(address, server)
            with httpx2.Client(base_url=address, timeout=_START_SECONDS) as client:
                model = client.get("/models").json()["data"][0]["id"]
                for question in questions:
                    asked: dict[str, Any] = {"model": model, **sampling}
                    if is_chat:
                        asked["messages"] = [{"role": "user", "content": question}]
                    else:
                        asked["prompt"] = question
                    path = "/chat/completions" if is_chat else "/completions"
                    reply = client.post(path, json=asked).raise_for_status()
                    (choice,) = reply.json()["choices"]
                    text = choice["message"]["content"] if is_chat else choice["text"]
                    confidence = choice["confidence"]
                    shown = choice["confidence_reason"]
                    if confidence is not None:
                        shown = f"{confidence:.2f}"
                    print(f"{question}   confidence {shown}   {' '.join(text.split())}", flush=True)
        finally:
            server.terminate()
    return 0


def wait_for(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server lists its models."""
    from megatron_dcpo.errors import UserError
    from megatron_dcpo.runtime.served_models import list_models

    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            list_models(endpoint, "see its log")
            return
        except UserError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"run.py: error: {error}") from None
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
