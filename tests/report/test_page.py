"""The page: self-contained, small for any run, escaped, accessible, tolerant."""

import fcntl
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moemesh.report import page
from moemesh.report.document import GLOSSARY, Table
from moemesh.report.explain import explain
from moemesh.trace import step_seconds as parts
from moemesh.trace.ledger import Ledger
from moemesh.trace.run import FILES, Run, RunError
from moemesh.trace.step_seconds import StepSeconds, communication
from tests.report.fake_run import write_fake_run

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Document(HTMLParser):
    """Checks that tags are balanced; collects tags, ids and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_fake_run(tmp_path_factory.mktemp("runs") / "tiny", num_steps=60)


def test_one_offline_file(tiny):
    before = set(tiny.iterdir())
    path = page.write(tiny)
    assert path == tiny / "report.html"
    assert set(tiny.iterdir()) == before | {path}
    text = read(path)
    document = Document(text)
    assert not document.of("script") and not document.of("link") and not document.of("img")
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    # 5 curves of the training and 1 of the loads, each for wide pages and for phones; 4 pictures,
    # and the legend and the 4 layers of the map of loads.
    assert len([one for one in document.of("svg") if one.get("role") == "img"]) == 21
    assert text == read(page.write(tiny))


def test_what_the_page_says(tiny):
    texts = " ".join(Document(read(page.write(tiny))).texts)
    for expected in (
        *("1f1b", "is dead", "nats a byte", "Started 2026-11-22 11:36:02 UTC", "reduce_scatter"),
        *("unigram 3.21", "rank 3", "Peak, measured: 321.2 MiB"),
    ):
        assert expected in texts
    # 2 phases * 8 operations * 3 * 2**19 bytes halved, plus ranks 0+1+2+3 times 4096, over 4 ranks.
    assert f"{2 * 8 * (4 * 3 * 2**19 + 6 * 4096) // 2:,}" in texts


def test_accessible(tiny):
    document = Document(read(page.write(tiny)))
    assert document.of("html")[0]["lang"] == "en"
    identities = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    for _, attributes in document.tags:
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in identities
    for attributes in document.of("a"):
        assert attributes["href"].removeprefix("#") in identities
    assert all(attributes.get("scope") in ("row", "col") for attributes in document.of("th"))
    assert len(document.of("caption")) == len(document.of("table")) > 8
    levels = [int(tag[1]) for tag, _ in document.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}


@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing(tmp_path, missing):
    folder = write_fake_run(tmp_path / "run", num_steps=20)
    (folder / missing).unlink(missing_ok=True)
    text = read(page.write(folder))
    Document(text)
    # A page without these files is shorter and has no note about them.
    quiet = ("summary.json", "failure.json", "plan.json", "timeline_simulated.json")
    if missing not in (*quiet, "ledger_predicted.json", "seconds.json"):
        assert f"No {missing}." in text


@pytest.mark.parametrize("only", FILES)
def test_any_file_alone_may_be_torn(tmp_path, only):
    (tmp_path / only).write_text('{"half')
    assert "Not everything could be read" in read(page.write(tmp_path))


def test_what_comes_from_files_is_escaped(tmp_path):
    hostile = "</pre></title><script>alert('x')</script><img src=x onerror=alert(1)>\x00\ud800"
    folder = write_fake_run(tmp_path / "<script>alert(2)<script>", num_steps=20)
    config = f"[model]\npreset = {json.dumps(hostile[:-2])}\n"
    (folder / "config.toml").write_text(config)
    (folder / "plan.json").write_text(json.dumps({hostile: hostile, "pp": hostile}))
    (folder / "failure.json").write_text(json.dumps({"error": hostile, hostile: [hostile]}))
    (folder / "summary.json").write_text(json.dumps({hostile: {hostile: 1}}))
    for name in ("ledger.json", "timeline.json"):
        data = json.loads((folder / name).read_text())
        for row in data["ranks"][0]["entries"] if name == "ledger.json" else data["records"]:
            row.update(
                dict.fromkeys(
                    ("axis", "op", "caller") if "axis" in row else ("name", "kind"), hostile
                )
            )
        (folder / name).write_text(json.dumps(data))
    text = read(page.write(folder))
    document = Document(text)
    assert not document.of("script") and not document.of("img")
    assert not any(key.startswith("on") for _, attributes in document.tags for key in attributes)
    assert "This run failed" in text
    assert "&lt;script&gt;" in text


def test_long_runs_stay_small(tmp_path):
    folder = write_fake_run(
        tmp_path / "long",
        num_steps=5_000,
        num_layers=48,
        num_experts=128,
        num_ranks=32,
        loads_every=1000,
        records_per_rank=100,
    )
    line = json.loads((folder / "timeline.json").read_text())
    for number, record in enumerate(line["records"]):  # no two neighbours are alike
        record.update(kind="FB"[number % 2] if record.get("kind") else "", name=f"work {number}")
    (folder / "timeline.json").write_text(json.dumps(line))
    (folder / "timeline_simulated.json").write_text(json.dumps(line | {"source": "simulated"}))
    (folder / "config.toml").write_text("# " + "x" * 3_000_000)
    (folder / "failure.json").write_text(json.dumps({"traceback": "y" * 3_000_000}))
    path = page.write(folder)
    assert path.stat().st_size <= 400_000
    assert "5,000" in read(path)


def test_a_column_without_a_value_is_left_out():
    given = Table(caption="", header=("Part", "Simulated", "Measured"), rows=[("a", "", "1")])
    assert (given.header, given.rows) == (["Part", "Measured"], [["a", "1"]])
    assert Table(caption="", header=("Part", "Measured"), rows=[]).header == ("Part", "Measured")


def test_no_run(tmp_path):
    with pytest.raises(RunError):
        page.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def tables(text: str) -> dict[str, str]:
    """Caption -> the text of the table."""
    captioned = re.findall(r"<caption>(.*?)</caption>(.*?)</table>", text, flags=re.DOTALL)
    return {caption: re.sub(r"<[^>]+>|\s+", " ", body) for caption, body in captioned}


def test_what_differs_from_the_defaults_comes_before_the_other_keys(tmp_path):
    text = read(page.write(write_fake_run(tmp_path / "run", num_steps=5)))
    changed, others = [caption for caption in tables(text) if "eys" in caption][:2]
    assert changed == "Keys that differ from the defaults and the preset"
    section = " ".join(tables(text)[changed].split())
    assert "plan.tp 2 1" in section and "train.steps 400 200" in section
    # The version of the file is not a setting; a value that equals the default is not a change.
    assert "schema_version" not in section
    assert "plan.cp" not in section and "plan.schedule" not in section
    assert others.startswith("The other ") and "plan.cp" in tables(text)[others]
    assert text.index("<details>") < text.index("plan.cp")


def test_operations_are_whole_numbers(tmp_path):
    folder = write_fake_run(tmp_path / "run", num_steps=5)
    data = json.loads((folder / "ledger.json").read_text()) | {"steps": 3}
    (folder / "ledger.json").write_text(json.dumps(data))
    sections = tables(read(page.write(folder)))
    operations = next(body for caption, body in sections.items() if "By operation" in caption)
    assert "of 3 steps" in str(list(sections))
    assert " ep all_to_all forward 16 " in " ".join(operations.split())


def test_a_live_run_says_when_files_come(tmp_path):
    folder = write_fake_run(tmp_path / "run", num_steps=5)
    for name in ("ledger.json", "memory.json", "timeline.json", "summary.json"):
        (folder / name).unlink()
    assert "No ledger.json." in read(page.write(folder))
    with (folder / "lease").open("w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        text = read(page.write(folder))
    assert "ledger.json is written at the end of the run" in text
    assert "running" in text


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_without_a_step_says_so(tmp_path, failed):
    folder = write_fake_run(tmp_path / "run", num_steps=5)
    for name in ("ledger.json", "memory.json", "timeline.json", "loads.jsonl", "summary.json"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").write_text("")
    if failed:
        (folder / "failure.json").write_text('{"kind": "OSError"}')
    text = read(page.write(folder))
    # Chapters that a run without a step cannot have are left out of the page of its failure.
    assert ("No step is finished yet." in text) == (not failed)
    assert ("No memory.json." in text) == (not failed) and "before its first step" in text
    assert ("failed before its first step" in text) == failed
    Document(text)


FAILURE = {
    "schema": 1,
    "kind": "RuntimeError",
    "message": "tensor a (3) must match tensor b (4)",
    "frames": ["Traceback (most recent call last):\n", '  File "x.py", line 3, in f\n    g()\n'],
    "rank": 1,
    "epoch": 1,
    "exit_code": 1,
    "collective": {"operation": "all_to_all", "group": "ep", "ranks": [0, 1], "missing": [1]},
    "advice": "change the sizes first",
}


def test_the_page_of_a_failed_run_begins_with_the_advice_and_is_readable(tmp_path):
    folder = write_fake_run(tmp_path / "run", num_steps=5)
    (folder / "failure.json").write_text(json.dumps(FAILURE))
    text = read(page.write(folder))
    document = Document(text)
    said = " ".join(document.texts)
    explanation = explain(Run.load(folder))
    # The advice is above everything but the title.
    assert said.index(explanation.sentences[0]) < said.index("Change the sizes first.")
    assert said.index("Change the sizes first.") < said.index("Started 2026")
    assert f"moemesh explain {folder}" in said and explanation.command in said
    assert "line 3, in f\n    g()" in said and "\\n" not in said
    assert "exit code" in said and "operation all_to_all, group ep, ranks 0; 1, missing 1" in said
    headers = re.findall(r'<th scope="row" class="name">(.*?)</th>', text)
    assert "kind" in headers and not {"schema", "epoch", "frames"} & {*headers}


def test_what_explain_says_is_on_every_page(tiny):
    said = " ".join(Document(read(page.write(tiny))).texts)
    explanation = explain(Run.load(tiny))
    assert " ".join(explanation.sentences) in said and explanation.command in said


@pytest.mark.parametrize(
    ("num_steps", "mebibytes"),
    [(10_000, 150), pytest.param(100_000, 200, marks=pytest.mark.slow)],
)
def test_a_page_of_many_steps_is_small_and_cheap(tmp_path, num_steps, mebibytes):
    """48 layers x 128 experts. The limit of seconds is loose: other processes share the machine."""
    folder = write_fake_run(
        tmp_path / "run", num_steps=num_steps, num_layers=48, num_experts=128, loads_every=400
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process is read from /proc")
    # Not ru_maxrss: a child starts with that of the process that forked it.
    program = (
        "import re, resource, sys; from moemesh.report import page; page.write(sys.argv[1]);"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1];"
        "print(peak, resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    figures = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert (folder / "report.html").stat().st_size <= 400_000
    assert int(figures[0]) <= mebibytes * 1024
    assert float(figures[1]) <= 10


def test_where_the_run_came_from(tmp_path):
    folder = write_fake_run(tmp_path / "run", num_steps=5)
    start = {"argv": ["moemesh", "train", "--set", "data.path=a b"]}
    start["hosts"] = [{"host": "node-7", "ranks": [0, 1]}, {"host": "node-8", "ranks": [2]}]
    (folder / "provenance.json").write_text(json.dumps({"starts": [{}, start]}))
    texts = " ".join(Document(read(page.write(folder))).texts)
    assert "On node-7, node-8." in texts
    assert "Command: moemesh train --set 'data.path=a b'" in texts
    for torn in ({"starts": [7]}, {"starts": [{"argv": 3, "hosts": "x"}]}, {}):
        (folder / "provenance.json").write_text(json.dumps(torn))
        Document(read(page.write(folder)))


def with_seconds(folder: Path) -> Path:
    """A run with seconds by part (10 a step), and with waits in its timeline."""
    write_fake_run(folder, num_steps=20)
    ep = communication("ep")
    measured = {parts.ATTENTION: 4.0, parts.EXPERTS: 2.0, ep: 3.0, parts.REST: 1.0}
    predicted = {parts.ATTENTION: 1.0, parts.EXPERTS: 2.5, ep: 1.0}
    seconds = StepSeconds(steps=19, ranks={0: measured}, predicted={0: predicted})
    (folder / "seconds.json").write_text(json.dumps(seconds.to_json()))
    line = json.loads((folder / "timeline.json").read_text())
    last = max(record["step"] for record in line["records"] if record.get("step"))
    passes = [r for r in line["records"] if r.get("step") == last and r.get("kind") == "F"]
    for record in passes:
        middle = (record["start"] + record["end"]) / 2
        line["records"].append({**record, "end": middle, "name": ep, "kind": "communication"})
    (folder / "timeline.json").write_text(json.dumps(line))
    return folder


def test_seconds_of_a_step_are_predicted_beside_measured(tmp_path):
    text = read(page.write(with_seconds(tmp_path / "run")))
    table = text.partition("of a step by part, mean rank")[2].partition("</table>")[0]
    table = table.partition("<table>")[2]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    assert rows == [
        ["Part", "Predicted", "Measured", "Difference", "Share, measured"],
        ["attention", "1,000.000", "4,000.000", "-75.00 %", "40.0%"],
        ["experts", "2,500.000", "2,000.000", "+25.00 %", "20.0%"],
        ["norms and the rest", "", "1,000.000", "", "10.0%"],
        ["communication over ep", "1,000.000", "3,000.000", "-66.67 %", "30.0%"],
        ["whole step", "4,500.000", "10,000.000", "-55.00 %", "100.0%"],
    ]
    assert "Attention: 4 times the prediction; the prediction is for uniform routing" in text
    assert "Communication over ep: 3 times the prediction" in text and "Experts: " not in text
    # No second table of the same figures.
    assert "Median over all steps" not in text and "Parts of the last step" not in text


def test_communication_has_a_colour_and_is_subtracted_from_computation(tmp_path):
    folder = with_seconds(tmp_path / "run")
    text = read(page.write(folder))
    assert ">communication</text>" in text and "#c2347f" in text
    shares = [
        float(share)
        for share in re.search(
            r"ranks compute ([\d.]+)% of the time, communicate ([\d.]+)% and idle ([\d.]+)%", text
        ).groups()
    ]
    assert sum(shares) == pytest.approx(100, abs=0.2) and shares[1] > 1
    explanation = explain(Run.load(folder))
    together = ("communication", "bubble", "imbalance")
    assert sum(explanation.shares.get(name, 0) for name in together) == pytest.approx(0.3)
    assert sum(explanation.shares.values()) == pytest.approx(1)


def test_bytes_that_differ_from_their_prediction_have_a_sentence(tmp_path):
    folder = write_fake_run(tmp_path / "run", num_steps=20)
    assert "About the predictions" not in read(page.write(folder))
    memory = json.loads((folder / "memory.json").read_text())
    memory["predicted"] = [
        {**row, "activations": row["activations"] // 2} for row in memory["ranks"]
    ]
    (folder / "memory.json").write_text(json.dumps(memory))
    ledgers = json.loads((folder / "ledger_predicted.json").read_text())
    for row in (row for rank in ledgers["ranks"] for row in rank["entries"]):
        row["wire_bytes"] *= 1 + (row["axis"] == "ep")
    (folder / "ledger_predicted.json").write_text(json.dumps(ledgers))
    text = read(page.write(folder))
    assert "Activations: 2 times the prediction; the prediction is for uniform routing" in text
    assert "Over ep, forward: 0.5 times the prediction" in text and "Over tp" not in text


def test_a_page_explains_its_words_and_no_others(tiny):
    text = read(page.write(tiny))
    words = text.partition(">Words of this page</h2>")[2].partition("</section>")[0]
    explained = re.findall(r"<li>(\w+): ", words)
    assert {"ep", "tp", "pp", "entropy", "unigram", "rank"} <= {*explained}
    assert not {"edp", "exposed", "MFU"} & {*explained}
    assert GLOSSARY.keys() >= {"dp_cp", "stage", "world", "control", "stream", "entropy", "exposed"}
    # The axes and classes of pages of another plan are explained there.
    record = {"axis": "edp", "op": "all_reduce", "phase": "backward", "caller": "x"}
    sizes = dict.fromkeys(("payload_bytes", "wire_bytes", "received_bytes"), 10)
    ledger = Ledger()
    ledger.record(**record, **sizes)
    run = replace(Run.load(tiny), ledgers={0: ledger})
    assert "edp: ranks that hold the same experts" in page.document(run).to_html()
