"""Responses judged as mathematics, unless a test names another verifier."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_dcpo.judging import judge as judging
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.types import Judgement, Prompt, Response

judge_many = partial(judging.judge_many, verifier=verify_answers)


def judge(response: Response, prompt: Prompt, *how: Any, **options: Any) -> Judgement:
    return judge_many([response], {prompt.prompt_id: prompt}, *how, **options)[0]
