"""The page of a plan: offline, small, escaped, with all facts of the text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moemesh.cli.plan_text import plan_document
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import PlannedAnswer, plan_named, train_command
from moemesh.trace.memory_profile import PREDICTED_PEAK
from tests.report.test_page import Document
from tests.test_cli import Invoke


@pytest.fixture(scope="module")
def planned() -> PlannedAnswer:
    why = ["tp=4,data=zero3", "tp=3", "pp=2,recompute=none,data=replicate"]
    return plan_named(
        PlanRequest(
            "deepseek-v2-lite", "dgx_h100", 4096, 64, top=4, tokens="1T", why=why, trainable=True
        )
    )


def test_the_page_needs_nothing_else(planned: PlannedAnswer) -> None:
    page = plan_document(planned, "--model m").to_html()
    document = Document(page)
    assert len(page.encode()) < 1.5e6
    assert set(re.findall(r"https?://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not document.of("script") and not document.of("link") and not document.of("img")
    assert "prefers-color-scheme: dark" in page
    (viewport,) = [one for one in document.of("meta") if one.get("name") == "viewport"]
    assert "width=device-width" in (viewport["content"] or "")
    ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_says_the_choice_the_rivals_and_the_command(planned: PlannedAnswer) -> None:
    page = plan_document(planned, "--model m").to_html()
    text = " ".join(Document(page).texts)
    best = planned.candidates[0]
    assert f"{planned.speed(best).mfu:.1%}" in text
    assert f"{planned.speed(best).gpu_hours(1e12):,.0f}" in text
    for rival in planned.rivals:
        assert rival.asked in text
    assert "illegal: tp 3 does not divide the 8 devices" in text
    command = train_command(best.layout, planned.model)
    (shown,) = re.findall(r"<pre>(.*?)</pre>", page, flags=re.DOTALL)
    assert shown.replace(" \\\n ", "") == command
    assert "all_to_all" in text and "Transfers" in text
    # The words of the configuration, the roles, and which memory it is.
    for name in ("microbatches", "zero1", "recommended", "80 %:", "MFU:", PREDICTED_PEAK):
        assert name in text
    heads = {name.strip() for name in re.findall(r"<th[^>]*>(.*?)</th>", page, flags=re.DOTALL)}
    assert {"Seconds a step", "Memory, GiB", "Tokens/s a device", "Bytes of one"} <= heads


def test_bars_are_as_wide_as_their_parts(planned: PlannedAnswer) -> None:
    page = plan_document(planned, "--model m").to_html()
    pieces = re.findall(r'width="([\d.]+)"[^>]*><title>layout (\d)[^:]*: ([^<]*)</title>', page)
    capacity = planned.cluster.memory_bytes * planned.pricing.usable_share
    widths: dict[tuple[str, bool], float] = {}
    for width, number, said in pieces:
        of_bar = number, " s (" in said
        widths[of_bar] = widths.get(of_bar, 0.0) + float(width)
    assert len(widths) == 2 * len(planned.candidates)
    first = planned.candidates[0]
    for number, candidate in enumerate(planned.candidates, start=1):
        seconds = widths[f"{number}", True] / widths["1", True]
        assert seconds == pytest.approx(candidate.seconds / first.seconds, abs=0.01)
        needed = widths[f"{number}", False] / widths["1", False]
        assert needed == pytest.approx(candidate.memory.needed / first.memory.needed, abs=0.01)
    assert "usable: " in page and f"{planned.pricing.usable_share:.1%}" in page
    assert first.memory.needed <= capacity


def test_the_verb_writes_the_page(tmp_path: Path, invoke: Invoke) -> None:
    words = "plan --model tiny --cluster laptop_cpu --seq-len 64 --global-batch 8 --top 1 --json"
    code, out, _ = invoke(*words.split(), "--html", str(tmp_path / "plan.html"))
    assert code == 0 and json.loads(out)["plans"][0]["speed"]["mfu"] > 0
    Document((tmp_path / "plan.html").read_text(encoding="utf-8"))
    code, _, err = invoke(*words.split(), "--html", str(tmp_path / "nowhere" / "plan.html"))
    assert code == 2 and "does not exist" in err
