"""What ``verifiers_agent.py`` uses of verifiers 0.1: an environment of two turns."""

import inspect
from types import SimpleNamespace


class EmptyModelResponseError(Exception):
    pass


class Rubric:
    def __init__(self, funcs, weights):
        self.funcs = funcs
        self.weights = weights

    async def score_rollout(self, state):
        metrics = {}
        for function in self.funcs:
            try:
                value = function(state["completion"], state["answer"])
                metrics[function.__name__] = await value if inspect.isawaitable(value) else value
            except Exception:  # as the real one
                metrics[function.__name__] = 0.0
        state["reward"] = sum(metrics.values())
        state["metrics"] = metrics


def right(completion, answer):
    text = completion[-1]["content"]
    assert "0.987" not in text, "a confidence"
    if "raise" in text:
        raise ValueError("cannot score this")
    return float(text == f"It is {answer}.\n")


async def rollout(row, client, model, sampling_args):
    state = {"answer": row["answer"], "completion": []}
    for _ in range(2):
        messages = row["prompt"] + state["completion"]
        reply = await client.chat.completions.create(model=model, messages=messages)
        text = reply.choices[0].message.content
        if not text:
            return {**state, "error": EmptyModelResponseError()}
        said = {"role": "assistant", "content": text}
        state["completion"] += [said, {"role": "user", "content": "Go on."}]
    state["completion"].pop()
    return state


def load_environment(name):
    if name != "sums":
        raise ModuleNotFoundError(f"no environment {name!r}")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "answer": str(2 * n),
            "info": {"size": n},
        }
        for n in (1, 2, 3, 4)
    ]
    return SimpleNamespace(
        dataset=rows, eval_dataset=rows[:1], rubric=Rubric([right], [1.0]), rollout=rollout
    )
