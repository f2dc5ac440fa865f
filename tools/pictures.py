"""Take the pictures of the documentation, docs/report.png and docs/rollouts.png, from the runs of
the quickstart.

    python tools/pictures.py runs/pictures [--out docs] [--narrow build/pictures]

Headless Chromium (``apt-get install chromium``), 1,280 wide; the same pages 420 wide go to
--narrow, to be looked at. The rollouts are those of the middle of a training.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_dcpo.evaluation.report import write_report  # noqa: E402
from megatron_dcpo.evaluation.run_description import total_steps  # noqa: E402
from megatron_dcpo.evaluation.runs import find_runs  # noqa: E402

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MOST_BYTES = 250_000
NARROWEST = 500  # of a window of Chromium; a narrower page is shown in a frame
SIZES = {"report": {1280: 1530, 420: 3600}, "rollouts": {1280: 1000, 420: 1600}}  # width: height
ROLLOUTS_ALONE = "main > section:not(#rollouts) { display: none }"


def until_the_middle(run: Path, copy: Path) -> int:
    """Copy of a run directory what its page reads, up to half of its steps; return that step."""
    last = (total_steps(run) or 0) // 2
    copy.mkdir(parents=True)
    shutil.copy(run / "config.yaml", copy)
    rows = [
        row
        for row in (run / "metrics.jsonl").read_text().splitlines()
        if json.loads(row)["step"] <= last
    ]
    (copy / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (copy / "samples").mkdir()
    for file in (run / "samples").glob("step_*.jsonl"):
        if int(file.stem.removeprefix("step_")) <= last:
            shutil.copy(file, copy / "samples")
    return last


def chromium(place: str, width: int, height: int, url: str, what: str) -> str:
    """Let the browser load a page and do ``what``; return what it prints."""
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=5000",
    ]
    options += [
        f"--user-data-dir={place}/profile",
        f"--window-size={max(width, NARROWEST)},{height}",
        what,
    ]
    return subprocess.run(
        [CHROMIUM, *options, url], check=True, capture_output=True, text=True, timeout=180
    ).stdout


def take(url: str, width: int, height: int, target: Path) -> None:
    """Take a picture of a page, and save it with as few colors as make it small."""
    with tempfile.TemporaryDirectory() as place:
        if width < NARROWEST:  # the page as its scripts have left it, in a frame
            drawn = re.sub(
                r"<script>.*?</script>",
                "",
                chromium(place, width, height, url, "--dump-dom"),
                flags=re.DOTALL,
            )
            style = f"border:0; width:{width}px; height:{height}px"
            inner = f'<iframe srcdoc="{html.escape(drawn)}" style="{style}"></iframe>'
            frame = f'<body style="margin:0">{inner}'
            page = Path(place) / "frame.html"
            page.write_text(frame)
            url = page.as_uri()
        chromium(place, width, height, url, f"--screenshot={place}/taken.png")
        with Image.open(f"{place}/taken.png") as picture:
            small = (
                picture.convert("RGB")
                .crop((0, 0, width, height))
                .quantize(128, dither=Image.Dither.NONE)
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    small.save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{target} has {target.stat().st_size:,} bytes, at most {MOST_BYTES:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("quickstart", type=Path, help="what the quickstart left")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--narrow", type=Path, default=ROOT / "build" / "pictures")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("there is no chromium on the PATH; apt-get install chromium")
    with tempfile.TemporaryDirectory() as place:
        until_the_middle(arguments.quickstart / "dcpo_proper", Path(place) / "dcpo_proper")
        runs = find_runs([arguments.quickstart / name for name in ("base", "grpo", "dcpo_proper")])
        report = write_report(runs, Path(place) / "report.html")
        middle = write_report(
            find_runs([Path(place) / "dcpo_proper"]), Path(place) / "rollouts.html", "dcpo_proper"
        )
        middle.write_text(middle.read_text().replace("</style>", f"{ROLLOUTS_ALONE}</style>"))
        for page in (report, middle):
            for width, height in SIZES[page.stem].items():
                narrow = "" if width >= NARROWEST else f"_{width}"
                folder = arguments.narrow if narrow else arguments.out
                take(page.as_uri(), width, height, folder / f"{page.stem}{narrow}.png")


if __name__ == "__main__":
    main()
