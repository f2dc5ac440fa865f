"""The page of ``dcpo report --serve`` in headless Chromium (``make test-browser``): a new step
appears without a reload.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from megatron_dcpo.evaluation import live
from tests.helpers.evaluated import trained
from tests.unit.evaluation.test_live import SAMPLE
from tools.pictures import CHROMIUM

pytestmark = pytest.mark.skipif(
    not os.environ.get("DCPO_TEST_BROWSER") or CHROMIUM is None,
    reason="make test-browser runs this; it needs chromium",
)


def test_a_new_step_appears_without_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("training:\n  steps: 177\n")
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / "step_000010.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    tag, asked = live._tag, []

    def first_then_more(root: Path) -> str:
        asked.append(root)
        if len(asked) == 2:
            with (root / "metrics.jsonl").open("a") as file:
                last = {
                    "step": 77,
                    "reward/accuracy": 0.75,
                    "time/step": 60.0,
                    "tokens/s/step": 12345.0,
                }
                file.write(json.dumps(last) + "\n")
        return tag(root)

    monkeypatch.setattr(live, "_tag", first_then_more)
    with live.live_server(tmp_path / "run", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=9000",
            "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"http://127.0.0.1:{server.server_port}/",
        ]
        page = subprocess.run(map(str, command), capture_output=True, text=True, timeout=180).stdout
        server.shutdown()
        thread.join()
    assert len(asked) >= 2
    assert (
        '<p class="runs" id="state">step 77 of 177 · 12,345 tokens/s · about 1 h 40 min left</p>'
        in page
    )
    assert '<span class="reasoning more" title="reasoning, advantage +0.5">' in page
    assert '<option value="sure-wrong">' in page
    assert "1 responses" in page  # counted by the page's script
    assert '<span class="confidence less" title="confidence, advantage -0.25">0.8</span>' in page
