"""The agent of ``agent.py`` as a plain program, in the standard library alone: it finds the policy
at OPENAI_BASE_URL, the problem on its standard input, and says with its last line whether the box
holds the answer.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request

from agent import CLOSES, OPENS, shown_for


def main() -> None:
    problem = json.load(sys.stdin)
    prompt = problem["prompt"]
    text = completed(prompt, stop=CLOSES)
    if text.startswith(OPENS):
        call = f"{text}{CLOSES}"
        text = completed(f"{prompt}{call}{shown_for(call)}")
    boxes = re.findall(r"\\boxed\{(\d+)\}", text)
    print(json.dumps({"score": float(boxes[-1:] == [problem["answer"]])}))


def completed(prompt: str, stop: str | None = None) -> str:
    """Return what the policy writes behind a text."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps({"model": "policy", "prompt": prompt, "stop": stop}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


if __name__ == "__main__":
    main()
