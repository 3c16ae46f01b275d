"""The page in a real browser: widths, colour schemes, contrast, print."""

import pytest

from moemesh.cli.plan_text import plan_document
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import plan_named
from moemesh.report import page
from moemesh.report.svg import luminance
from tests.report import browser
from tests.report.fake_run import write_fake_run

COMMAND = browser.find()
pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="no Chromium on the path (or in MOEMESH_TEST_BROWSER)"
)

#: Every visible text with its colour, and the colour of its background. A text of a
#: figure lies on the last opaque shape drawn before it that encloses its middle.
CONTRASTS = """
(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const level = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const luminance = c => 0.2126 * level(c[0]) + 0.7152 * level(c[1]) + 0.0722 * level(c[2]);
  const ratio = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const opaque = c => c.length === 3 || (c.length === 4 && c[3] === 1);
  const backdrop = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length && opaque(c)) return c;
    }
    return [255, 255, 255];
  };
  const texts = [];
  for (const details of document.querySelectorAll("details")) details.open = true;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement, text = node.textContent.trim();
    if (!text || !e.checkVisibility() || ["title", "desc"].includes(e.tagName)) continue;
    const svg = e.closest("svg");
    const style = getComputedStyle(e);
    let ink = parse(svg ? style.fill : style.color), ground = backdrop(svg || e);
    let size = parseFloat(style.fontSize);
    if (svg) {
      const box = e.getBoundingClientRect();
      size *= svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
      const x = box.left + box.width / 2, y = box.top + box.height / 2;
      for (const shape of svg.querySelectorAll("rect")) {
        if (!(shape.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
        const b = shape.getBoundingClientRect(), fill = getComputedStyle(shape).fill;
        if (fill === "none" || x < b.left || x > b.right || y < b.top || y > b.bottom) continue;
        ground = parse(fill);
      }
    }
    texts.push([ratio(ink, ground), size, text.slice(0, 40), svg !== null]);
  }
  return texts;
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    run = write_fake_run(folder / "run", num_steps=60)
    (run / "failure.json").write_text(
        '{"kind": "Killed", "message": "by signal 9 ' + "x" * 400 + '"}'
    )
    other = write_fake_run(folder / "other", num_steps=40)
    return [page.write(run), page.write_comparison(run, other)]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(COMMAND, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.representative("390-dark", "1200-light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_widths_and_colour_schemes(chromium, pages, width, scheme):
    for path in pages:
        chromium.open(path, width=width, scheme=scheme)
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        ground = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        texts = chromium.evaluate(CONTRASTS)
        assert len(texts) > 100
        assert [text for text in texts if text[0] < 4.5] == []
        # Labels of pictures keep a size that can be read, also on a phone.
        assert [text for text in texts if text[3] and text[1] < 8.5] == []


@pytest.mark.parametrize("width", [390, 1200])
def test_a_wide_table_scrolls_with_its_names_and_caption_in_sight(chromium, pages, width):
    """A shadow at the edge shows that it scrolls; no word of a name is broken."""
    chromium.open(pages[0], width=width)
    tables = chromium.evaluate("""
        [...document.querySelectorAll(".scroll")].filter(e => e.checkVisibility()).map(e => {
          e.scrollLeft = 9999;
          const box = e.getBoundingClientRect(), caption = e.querySelector("caption");
          const last = [...e.querySelectorAll("tbody tr:first-child > *")];
          return {
            wide: e.scrollWidth > e.clientWidth,
            caption: caption.getBoundingClientRect().right <= innerWidth,
            name: last[0].getBoundingClientRect().left >= box.left - 1,
            end: last.at(-1).getBoundingClientRect().right <= box.right + 1,
            shadow: getComputedStyle(e).backgroundImage.includes("linear-gradient"),
          };
        })
    """)
    assert len(tables) > 8 and any(one["wide"] for one in tables) == (width == 390)
    assert [
        one for one in tables if not all(value for key, value in one.items() if key != "wide")
    ] == []
    heights = chromium.evaluate(
        "[...document.querySelectorAll('td.name')].filter(e => ['backward', 'gradients']"
        ".includes(e.innerText)).map(e => e.getBoundingClientRect().height)"
    )
    assert heights and max(heights) < 40


def test_the_legend_of_a_picture_that_scrolls_is_in_sight(chromium, pages):
    legends = """
        [...document.querySelectorAll(".picture.only")].map(e => [
          [...e.parentElement.querySelectorAll(".keys li")]
            .filter(key => key.checkVisibility()).map(key => key.innerText),
          [...e.querySelectorAll('rect[width="12"][height="12"] + text')]
            .filter(text => text.checkVisibility()).map(text => text.textContent),
        ])
    """
    wide, narrow = [], []
    for pairs, width in ((wide, 1200), (narrow, 390)):
        chromium.open(pages[0], width=width)
        pairs += chromium.evaluate(legends)
    assert any("0.8 to 1.25 (balanced)" in keys for keys, _ in narrow)
    assert [keys for keys, _ in narrow] == [inside for _, inside in wide]
    assert not any(inside for _, inside in narrow) and not any(keys for keys, _ in wide)


def test_the_table_of_layouts_fits_a_window_and_the_shadow_is_dark(chromium, tmp_path):
    planned = plan_named(
        PlanRequest("qwen3-30b-a3b", "dgx_h100", 4096, 512, nodes=2, tokens="14.8T")
    )
    path = tmp_path / "plan.html"
    path.write_text(plan_document(planned, "--model m").to_html())
    chromium.open(path, width=1200, scheme="dark")
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert chromium.evaluate(f"{cut}.length") == 0
    shade = chromium.evaluate("getComputedStyle(document.body).getPropertyValue('--shade')")
    assert luminance(shade.strip()) < 0.1


def test_print_is_light_and_cuts_nothing(chromium, pages):
    chromium.open(pages[0], width=1200)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    hidden = "[...document.querySelectorAll('.scroll, .picture')].filter(e => "
    hidden += "e.checkVisibility() && getComputedStyle(e).overflowX !== 'visible').length"
    assert chromium.evaluate(hidden) == 0
    assert len(chromium.call("Page.printToPDF")["data"]) > 10_000
