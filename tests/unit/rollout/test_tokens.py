"""The tokenizer of a model directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_dcpo.rollout.tokens import load_tokenizer
from tests.helpers.paths import QUICKSTART

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(("other", "said"), [(TEMPLATE, False), ("{{ messages }}", True)])
def test_a_second_chat_template_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str, said: bool
) -> None:
    model = shutil.copytree(QUICKSTART / "policy", tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": other}))
    for _ in range(2):
        assert load_tokenizer(model).chat_template == TEMPLATE
    assert caplog.text.count("two chat templates") == int(said)
