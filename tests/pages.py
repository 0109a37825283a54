"""Check how a page looks in a browser, at the width of a desktop and of a phone."""

import json
import re
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path

WIDTHS = (1200, 390)

SCRIPT = """
function mistakes(page, width) {
  const found = new Set(), root = page.documentElement;
  if (root.scrollWidth > width) found.add(`the page is ${root.scrollWidth} wide`);
  for (const svg of page.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    const inside = (x, y, box) => x > box.left + 1 && x < box.right - 1 && y > box.top + 1 && y < box.bottom - 1;
    texts.forEach(([text, box], i) => {
      if (box.left < frame.left || box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom)
        found.add(`"${text}" is cut off`);
      for (const [other, its] of texts.slice(i + 1))
        if (box.left + 1 < its.right && its.left + 1 < box.right && box.top + 2 < its.bottom && its.top + 2 < box.bottom)
          found.add(`"${text}" lies on "${other}"`);
    });
    for (const line of svg.querySelectorAll("polyline")) {
      const length = line.getTotalLength(), place = line.getScreenCTM();
      for (let i = 0; i <= 500; i++) {
        const {x, y} = line.getPointAtLength(length * i / 500).matrixTransform(place);
        for (const [text, box] of texts) if (inside(x, y, box)) found.add(`"${text}" lies on a line`);
      }
    }
  }
  for (const box of page.querySelectorAll(".wide"))
    if (box.scrollWidth > box.clientWidth && box.querySelectorAll("thead th").length <= 6)
      found.add(`a table is ${box.scrollWidth} wide, in ${box.clientWidth}`);
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, range = page.createRange();
    if (!node.textContent.trim() || node.parentElement.closest("svg, style, .wide")) continue;
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.left < 0 || box.right > width) found.add(`"${node.textContent}" is cut off`);
  }
  return [...found];
}
onload = () => {
  const all = {};
  for (const frame of document.querySelectorAll("iframe"))
    all[frame.width] = mistakes(frame.contentDocument, Number(frame.width));
  document.querySelector("pre").textContent = JSON.stringify(all);
};
"""


def mistakes(browse: Callable[[Path], str], folder: Path, page: str) -> dict[str, list[str]]:
    """Return, for each width, text that is cut off or that overlaps other text or a curve. The page is HTML, or one SVG.

    A table of up to six columns must fit; a wider one may scroll.
    """
    frames = "".join(f'<iframe width="{w}" height="5000" srcdoc="{escape(page)}"></iframe>' for w in WIDTHS)
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f"<!doctype html><meta charset=utf-8><pre></pre>{frames}<script>{SCRIPT}</script>")
    shown = re.search(r"<pre>(.*?)</pre>", browse(wrapper), re.DOTALL)
    assert shown is not None, "the browser ran no script"
    return json.loads(unescape(shown[1]))


NONE = {str(width): [] for width in sorted(WIDTHS)}
