"""The report's page in a real browser, without a window."""

import json
import re
import shutil
import subprocess

import pytest
from stats_memory import run

from hpctk.stats.report import compare
from hpctk.stats.report.account import account
from hpctk.stats.report.document import document
from hpctk.stats.report.figures import Material
from hpctk.stats.report.page import page
from hpctk.stats.report.timeline import lanes

BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="not installed: Chromium (apt-get install chromium-headless-shell)"
)

#: What the browser found, written into the page: texts that lie upon each other or leave their drawing, and more.
MEASURE = """
const boxes = (svg) => Array.from(svg.querySelectorAll("text")).map((t) => [t.textContent, t.getBoundingClientRect()]);
const seen = Array.from(document.querySelectorAll("svg")).filter((svg) => svg.getBoundingClientRect().width > 0);
const clashes = [], outside = [];
for (const svg of seen) {
  const frame = svg.getBoundingClientRect(), texts = boxes(svg);
  texts.forEach(([a, one], i) => {
    if (one.left < frame.left - 1 || one.right > frame.right + 1 || one.bottom > frame.bottom + 1) outside.push(a);
    for (const [b, other] of texts.slice(i + 1)) {
      const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      // Boxes of letters have air above and below them.
      if (across > 0.5 && down > 0.35 * Math.min(one.height, other.height)) clashes.push(a + " | " + b);
    }
  });
}
document.body.insertAdjacentHTML("beforeend", "<pre id=measured></pre>");
document.getElementById("measured").textContent = JSON.stringify({
  clashes, outside, drawings: seen.length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  loaded: performance.getEntriesByType("resource").length,
  paper: getComputedStyle(document.body).backgroundColor,
  smallest: Math.min(...Array.from(document.querySelectorAll("svg text")).map((t) => t.getBoundingClientRect().height)
    .filter((height) => height > 0)),
});
"""


def opened(path, *options, part=""):
    """Return the page as the browser has it after its scripts ran."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent}/browser",
         *options, "--dump-dom", f"file://{path}{part}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(path, text, *options):
    path.write_text(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    found = re.search(r'<pre id="measured">(.*?)</pre>', opened(path, *options))
    assert found, "the page's scripts did not run"
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def made(stats):
    found = account(stats)
    return page(Material(document(found), found, lanes(stats)))


def side_by_side():
    documents = [document(account(run(size, density=d, steps=40))) for size, d in ((2, 1.0), (4, 0.01), (8, 0.2))]
    for i, one in enumerate(documents):
        one["run"] = f"runs/with-a-rather-long-name-{i}"
    return compare.page(compare.comparison(documents), documents)


PAGES = {
    "one": lambda: made(run(1)),
    "four": lambda: made(run(4, density=0.02, steps=460, attrs={"host": "node-with-a-long-name-0123"})),
    "many": lambda: made(run(300, per_node=8, steps=3)),
    "missing": lambda: made(run(6, missing=(2,), running=(4,), recordings=2, steps=30)),
    "compare": side_by_side,
}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_clashes_or_leaves_its_place(tmp_path, name, width):
    found = measured(tmp_path / "page.html", PAGES[name](), f"--window-size={width},900")
    assert found["clashes"] == []
    assert found["outside"] == []
    assert found["overflow"] <= 0
    assert found["loaded"] == 0
    assert found["drawings"] >= 3
    assert found["smallest"] >= 9


def test_by_day_and_by_night(tmp_path):
    text = PAGES["one"]()
    papers = [
        measured(tmp_path / "page.html", text, f"--blink-settings=preferredColorScheme={scheme}")["paper"]
        for scheme in (1, 0)
    ]
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 23, 29)"]


def column(dom, table, place):
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', dom, re.S)[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row)[place] for row in rows]


def test_a_click_on_a_head_sorts(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(made(run(12, steps=3)))
    assert column(opened(path), "ranks", 0) == [str(i) for i in range(12)]
    # The slow rank computes longest: numbers come the largest first.
    sorted_by_computing = opened(path, part="#sort=ranks,4")
    assert column(sorted_by_computing, "ranks", 0)[0] == "11"
    assert 'aria-sort="descending"' in sorted_by_computing
    # As numbers, not as text: 11, 10, 9.
    assert column(opened(path, part="#sort=ranks,0"), "ranks", 0) == [str(i) for i in reversed(range(12))]
    # Words from a to z.
    assert column(opened(path, part="#sort=calls,0"), "calls", 0) == ["allreduce", "flags"]


def test_sorting_again_turns_it_around(tmp_path):
    path = tmp_path / "page.html"
    twice = "for (let i = 0; i < 2; i++) document.querySelectorAll('#ranks th button')[0].click();"
    path.write_text(made(run(12, steps=3)).replace("</body>", f"<script>{twice}</script></body>"))
    assert column(opened(path), "ranks", 0) == [str(i) for i in range(12)]
