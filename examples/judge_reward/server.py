"""A judge model as reward: a reward server whose verdicts come from an OpenAI-compatible endpoint.

    python examples/judge_reward/server.py --endpoint http://127.0.0.1:8000/v1 [--port 8008]
    dcpo train --config examples/judge_reward/dcpo.yaml

The judge is asked whether an answer agrees with the reference, and to say Yes or No. The score is
the probability of Yes among the two, from the log-probs of the first token; an endpoint without
them gives 1 or 0 by its text. Anything else is an error of that answer, which
``judging.max_error_rate`` counts.

    python examples/judge_reward/server.py --endpoint URL --measure runs/eval/samples.jsonl

judges answers whose verdicts are known, and prints how calibrated the judge is on them: do this
before you train on it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QUESTION = """Question:
{problem}

Reference answer:
{answer}

Answer to be judged:
{response}

Does the last answer agree with the reference? Say Yes or No, nothing else."""
LONGEST = 8000  # characters of the answer, from its end
AT_ONCE = 16
MOST_BYTES = 64 << 20  # of a request
MOST_REPLY_BYTES = 1 << 20  # of the judge
IDLE_SECONDS = 30.0  # in which a client has to go on sending


class Judge:
    """The judge model ``model`` at ``endpoint``."""

    def __init__(self, endpoint: str, model: str, timeout: float) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.model = model
        self.timeout = timeout

    def verdict(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``score`` and what the judge said, or ``error``."""
        if not isinstance(item, Mapping):
            return {"error": f"an item is an object, not {type(item).__name__}"}
        missing = [name for name in ("problem", "answer", "response") if name not in item]
        if missing:
            return {"error": f"the item has no {', '.join(missing)}"}
        asked = QUESTION.format(
            problem=item["problem"],
            answer=item["answer"],
            response=str(item["response"])[-LONGEST:],
        )
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": 2,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 20,
        }
        try:
            text, score = read_reply(self._post(body))
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        except (AttributeError, OverflowError, RecursionError) as error:
            return {"error": f"the judge's reply cannot be read ({type(error).__name__})"}
        if score is None:
            return {"error": f"the judge says neither Yes nor No but {text[:60]!r}"}
        return {"score": score, "judge": text.strip()}

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        key = os.environ.get("OPENAI_API_KEY", "")
        request = urllib.request.Request(
            f"{self.endpoint}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            content = reply.read(MOST_REPLY_BYTES + 1)
        if len(content) > MOST_REPLY_BYTES:
            raise ValueError(f"the judge's reply has more than {MOST_REPLY_BYTES >> 20} MB")
        found: dict[str, Any] = json.loads(content)
        return found


def read_reply(reply: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return what the judge said and the score of it, None if it is neither Yes nor No."""
    choice = reply["choices"][0]
    text = choice["message"]["content"] or ""
    said = (choice.get("logprobs") or {}).get("content") or []
    score = share_of_yes(said[0]["top_logprobs"]) if said else None
    if score is None:
        score = {"yes": 1.0, "no": 0.0}.get(text.strip(" .").lower())
    return text, score


def share_of_yes(top: list[dict[str, Any]]) -> float | None:
    """Return the probability of Yes among Yes and No; None if neither is among the most probable
    first tokens.
    """
    mass = {"yes": 0.0, "no": 0.0}
    for entry in top:
        word = entry["token"].strip().lower()
        if word in mass:
            logprob = float(entry["logprob"])
            if not logprob <= 1e-3:
                raise ValueError(f"the judge's log-prob of {word} is {logprob}")
            mass[word] += math.exp(logprob)
    total = sum(mass.values())
    return mass["yes"] / total if total > 0 else None


def handler_of(judge: Judge, pool: ThreadPoolExecutor) -> type[BaseHTTPRequestHandler]:
    """Return the handler of the reward server's protocol (docs/bring_your_own.md)."""

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_POST(self) -> None:
            """Answer a request of ``judging.verifier``: a result for each item."""
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                self.answer(411, {"error": "Content-Length is missing"})
                return
            if int(length) > MOST_BYTES:
                self.answer(413, {"error": f"more than {MOST_BYTES >> 20} MB"})
                return
            try:
                items = json.loads(self.rfile.read(int(length)))["items"]
            except (ValueError, LookupError, TypeError, RecursionError):
                items = None
            if not isinstance(items, list):
                self.answer(400, {"error": "the body is a JSON object with a list of items"})
                return
            self.answer(200, {"results": list(pool.map(judge.verdict, items))})

        def answer(self, status: int, reply: Mapping[str, Any]) -> None:
            """Send a reply; what was not read of a refused request ends the connection."""
            body = json.dumps(reply).encode()
            self.close_connection = status != 200
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def measure(judge: Judge, path: str) -> None:
    """Print accuracy and calibration of the judge's probabilities against the verdicts of a file of
    ``dcpo evaluate``.
    """
    from megatron_dcpo.calibration import auroc, brier, ece
    from megatron_dcpo.evaluation.samples import read_samples

    samples = read_samples(path)
    items = [
        {
            "problem": sample.prompt.problem,
            "answer": sample.prompt.ground_truth,
            "response": (sample.response.text or "").partition("<conf>")[0],
        }
        for sample in samples
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(judge.verdict, items))
    pairs = [
        (result["score"], float(sample.correct))
        for result, sample in zip(results, samples, strict=True)
        if "score" in result
    ]
    scores = [score for score, _ in pairs]
    correct = [verdict for _, verdict in pairs]
    agreed = sum((score > 0.5) == (verdict > 0.5) for score, verdict in pairs)
    print(f"errors   {len(results) - len(pairs)} of {len(results)}")
    print(f"agrees   {agreed} of {len(pairs)}")
    for name, metric in (("ECE", ece), ("Brier", brier), ("AUROC", auroc)):
        print(f"{name:8} {metric(scores, correct):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint", required=True, help="http://host:8000/v1")
    parser.add_argument("--model", default="", help="if the endpoint has several")
    parser.add_argument("--port", type=int, default=8008)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument(
        "--measure", metavar="FILE", help="samples.jsonl with verdicts that are known"
    )
    args = parser.parse_args()
    model = args.model
    if not model:
        with urllib.request.urlopen(f"{args.endpoint}/models") as reply:
            model = json.loads(reply.read())["data"][0]["id"]
    judge = Judge(args.endpoint, model, args.timeout)
    if args.measure:
        measure(judge, args.measure)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        server = ThreadingHTTPServer(("127.0.0.1", args.port), handler_of(judge, pool))
        print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
