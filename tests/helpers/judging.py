"""One response judged alone."""

from __future__ import annotations

from typing import Any

from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.types import Judgement, Prompt, Response


def judge(response: Response, prompt: Prompt, *how: Any, **options: Any) -> Judgement:
    return judge_many([response], {prompt.prompt_id: prompt}, *how, **options)[0]
