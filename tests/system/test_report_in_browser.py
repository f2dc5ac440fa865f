"""``report.html`` in headless Chromium, from a file, without a network: on a phone and on a
desktop.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from megatron_dcpo.evaluation import report
from megatron_dcpo.evaluation.results import write_evaluation
from megatron_dcpo.evaluation.runs import find_runs
from megatron_dcpo.evaluation.scoring import score_samples
from tests.helpers.evaluated import changed, make_samples, trained
from tools.pictures import CHROMIUM

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; install it to check the report in a browser"
)

# Runs in a copy of the page once everything is loaded; what it finds is read from the dumped outer
# document.
PROBE = """
<script>
addEventListener("load", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const images = [...document.querySelectorAll("img")];
  const outside = element => {
    for (let e = element; e; e = e.parentElement) if (getComputedStyle(e).overflowX !== "visible") return false;
    return element.getBoundingClientRect().right > innerWidth + 1;
  };
  const found = {
    width: innerWidth,
    scroll: document.documentElement.scrollWidth,
    outside: [...document.querySelectorAll("body *:not(svg *)")].filter(outside).map(e => e.outerHTML.slice(0, 80)),
    pictures: [...document.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect().width),
    images: images.map(image => image.naturalWidth),
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
    broken_ids: [...document.querySelectorAll("use")].map(u => u.getAttribute("href") || u.getAttribute("xlink:href"))
      .filter(name => name && !document.getElementById(name.slice(1))),
    first_number: document.querySelector("tbody td").getBoundingClientRect().left,
    rows: document.querySelectorAll("tbody tr").length,
  };
  parent.document.documentElement.setAttribute("data-probe", JSON.stringify(found));
});
</script>
"""


def probe(page: Path, width: int, tmp_path: Path) -> dict[str, object]:
    probed = tmp_path / f"probed_{width}.html"
    text = page.read_text().replace("</head>", PROBE + "</head>")
    if width < 500:  # a window of Chromium is never narrower: a frame is
        frame = f'<iframe srcdoc="{html.escape(text)}" style="width:{width}px; height:900px; border:0"></iframe>'
        text = f"<html><body>{frame}</body></html>"
    probed.write_text(text)
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={max(width, 500)},1000",
        "--dump-dom",
        probed.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    found = re.search(r'<html[^>]* data-probe="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    result: dict[str, object] = json.loads(html.unescape(found[1]))
    return result


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, one with a long name, of two benchmarks, with training curves and the paper's
    numbers.
    """
    root = tmp_path_factory.mktemp("runs")
    names = ["base", "grpo", "dcpo_with_a_rather_long_name/of_a_run"]
    for seed, name in enumerate(names):
        samples = make_samples(seed=seed)
        samples += [changed(sample, task="math500") for sample in make_samples(seed=seed + 10)]
        evaluation = score_samples(
            samples, ["verbal", "token", "consistency"], model=name, resamples=0
        )
        (root / name).mkdir(parents=True)
        (root / name / "evaluation.json").write_text(json.dumps(evaluation))
        trained(root / name)
    return report.write_report(find_runs([root / name for name in names]), root / "report.html")


@pytest.mark.parametrize("width", [390, 1280])
def test_page_renders_without_overflow_and_without_network(
    page: Path, tmp_path: Path, width: int
) -> None:
    found = probe(page, width, tmp_path)
    assert found["width"] == width
    assert found["scroll"] <= width, found["outside"]  # type: ignore[operator]
    assert found["outside"] == [], "wide tables scroll inside their own frame"
    assert found["requests"] == []
    assert found["broken_ids"] == []
    pictures = found["pictures"]
    assert isinstance(pictures, list)
    assert len(pictures) >= 9 + 3
    assert all(100 < picture <= width for picture in pictures)
    assert found["rows"] > 20  # type: ignore[operator]
    assert found["first_number"] < width - 60, "the first number is seen without scrolling"  # type: ignore[operator]


def test_the_probe_sees_what_it_is_for(page: Path, tmp_path: Path) -> None:
    """The same probe on a page with a wide element, a request and a broken image."""
    broken = tmp_path / "broken.html"
    extra = '<div style="width:900px">wide</div><img src="https://example.org/x.png"></main>'
    broken.write_text(page.read_text().replace("</main>", extra))
    found = probe(broken, 390, tmp_path)
    assert found["scroll"] >= 900  # type: ignore[operator]
    assert found["outside"]
    assert found["images"] == [0]
    assert found["requests"]


def test_pictures_on_disk_decode(tmp_path: Path) -> None:
    """The PNG and SVG files that an evaluation leaves, shown by a page of their own."""
    samples = make_samples(seed=3)
    write_evaluation(tmp_path / "run", score_samples(samples, ["verbal"], resamples=0), samples)
    files = sorted((tmp_path / "run" / "diagrams").iterdir())
    assert {file.suffix for file in files} == {".png", ".svg"}
    shown = "".join(f'<img src="{file.as_uri()}">' for file in files)
    gallery = tmp_path / "gallery.html"
    gallery.write_text(
        f"<html><head></head><body><table><tbody><tr><td>1</td></tr></tbody></table>{shown}</body></html>"
    )
    images = probe(gallery, 1280, tmp_path)["images"]
    assert isinstance(images, list)
    assert len(images) == len(files) >= 6
    assert all(width > 100 for width in images)
