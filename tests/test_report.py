"""The page of a run: everything that is there is shown, nothing that is damaged stops it or is hidden."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samestep import report
from samestep.errors import SpecError
from samestep.report import _charts

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
VOID = {"meta", "link", "br", "rect", "path", "circle"}

QUALITY = {
    "items": 12101,
    "distinct_ids": 11821,
    "collision_rate": 0.0231386,
    "largest_bucket": 9,
    "gini": 0.0231,
    "levels": [
        {
            "level": k,
            "used": 256 - k,
            "n_centroids": 256,
            "perplexity": 230.5 - k,
            "relative_error": 0.5 / (k + 1),
        }
        for k in range(3)
    ],
    "after_resolving": {"distinct": 12101, "collisions": 0},
    "top_buckets": [{"codes": [7, 8, 9], "items": 9}],
}
MANIFEST = {
    "recipe": "semantic-ids",
    "workers": 4,
    "shards": 8,
    "threads": 1,
    "seed": 20261130,
    "versions": {"samestep": "0.1.0", "torch": "2.13.0"},
}


class Page(HTMLParser):
    """Text, elements and balance of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.words: list[str] = []
        self.ids: set[str] = set()
        self.feed(self.source)
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))
        self.svgs = re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)
        for svg in self.svgs:
            ElementTree.fromstring(svg)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for key, value in attrs if key == "id" and value}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def lines(entries: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def metrics(n: int, stride: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "step": i * stride,
            "loss": 3 * math.exp(-i / 20) + 0.01,
            "lr": [1e-3, 5e-4],
            "samples_per_second": 1000.0 + i,
            "grad_norm": 1.5,
            "momentum_factor": 1.0,
            "reconstruction": 0.25,
            "sums": {"correct": i},
            "note": "text is no series",
        }
        for i in range(n)
    ]


def whole_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    (folder / "config.yaml").write_text("global_batch_size: 1024\nseed: 1\nlr: 0.001\n")
    (folder / "metrics.jsonl").write_text(lines(metrics(50)))
    audits = [{"step": s, "verdict": "agree"} for s in range(0, 500, 50)]
    audits[4] = {
        "step": 200,
        "verdict": "differ",
        "tensor": "encoder.2.weight",
        "ranks": {"a1": [0, 1, 3], "b2": [2]},
    }
    (folder / "audit.jsonl").write_text(lines(audits))
    (folder / "quality.json").write_text(json.dumps(QUALITY))
    return folder


def test_a_whole_run_shows_every_part(tmp_path: Path) -> None:
    path = report.write(whole_run(tmp_path / "run-7"))
    assert path == tmp_path / "run-7" / "report.html"
    page = Page(path)
    assert page.ids == {"audits", "curves", "quality", "what"}
    for words in (
        "run-7",
        "finished",
        "replicas differ: 1 of 10 audits",
        "the first at step 200",
        "tensor: encoder.2.weight",
        "ranks.a1: 0, 1, 3",
        "last logged step 490",
        "samples per second (median) 1,024",
        "Learning rate",
        "Reconstruction",
        "Sums.correct",
        "Residual energy",
        "collision rate 0.02314",
        "after resolving: distinct 12,101",
        "7, 8, 9 9 items",
        "recipe semantic-ids",
        "seed 20261130",
        "versions.torch 2.13.0",
        "global_batch_size 1024",
    ):
        assert words in page.text
    assert "could not be read" not in page.text
    # loss, throughput, lr, gradient norm, reconstruction, sums; the timeline; three of the codebooks. The momentum
    # factor that never moved is not drawn.
    assert len(page.svgs) == 6 + 1 + 3
    assert "Momentum" not in page.text
    assert "seed 1 " not in page.text  # the manifest says what ran, the config only what it leaves open


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    page = Page(report.write(whole_run(tmp_path / "run")))
    assert not re.search(r"https?:|//|<script|@import|url\(", page.source)
    assert "default-src 'none'" in page.source
    assert "prefers-color-scheme: dark" in page.source
    assert 'name="viewport"' in page.source


@pytest.mark.parametrize(
    "name", ["manifest.json", "config.yaml", "metrics.jsonl", "audit.jsonl", "quality.json"]
)
def test_each_file_alone_and_each_file_missing(name: str, tmp_path: Path) -> None:
    section = {"metrics.jsonl": "curves", "audit.jsonl": "audits", "quality.json": "quality"}.get(
        name, "what"
    )
    whole = whole_run(tmp_path / "whole")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(whole / name, alone / name)
    assert Page(report.write(alone)).ids == {section}
    (whole / name).unlink()
    page = Page(report.write(whole))
    assert page.ids == {"audits", "curves", "quality", "what"} - ({section} - {"what"})
    assert ("running, or stopped early" in page.text) is (name == "manifest.json")
    assert ("not audited" in page.text) is (name == "audit.jsonl")


def test_damaged_lines_are_counted_and_named(tmp_path: Path) -> None:
    good = metrics(20)
    text = (
        lines(good[:10]).encode()
        + b'\xff\xfe{"step": 5}\n[1, 2]\n{"loss": 1}\n\n'
        + lines(good[10:]).encode()
    )
    (tmp_path / "metrics.jsonl").write_bytes(text + b'{"step": 99, "lo')
    (tmp_path / "audit.jsonl").write_text("x\n" * 40)
    page = Page(report.write(tmp_path))
    assert "metrics.jsonl: damaged and left out: 4 of 24 lines (lines 11, 12, 13, 25)" in page.text
    assert (
        "audit.jsonl: damaged and left out: 40 of 40 lines (lines 1, 2, 3, 4, 5, 6, 7, 8, ...)" in page.text
    )
    assert "last logged step 190" in page.text
    assert page.ids == {"curves"}


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", "quality.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"", b"3", b"[" * 20_000, b"a: [\n: :"])
def test_damaged_documents_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines(metrics(3)))
    (tmp_path / name).write_bytes(content)
    page = Page(report.write(tmp_path))
    assert page.text.count(name) >= 1
    assert "could not be read" in page.text
    assert "curves" in page.ids


def test_a_resumed_run_counts_the_later_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        lines([{"step": s, "loss": 8.0} for s in (1, 2, 3)] + [{"step": 2, "loss": 4.5}])
    )
    page = Page(report.write(tmp_path))
    assert (
        "metrics.jsonl: lines that repeat a step, as after a resume, of which the last counts: 1" in page.text
    )
    assert "lowest loss 4.5" in page.text


def test_infinite_missing_and_odd_values(tmp_path: Path) -> None:
    rows = (
        '{"step": 1, "loss": NaN, "lr": null}\n{"step": 2, "loss": Infinity, "big": 1e400, "huge": 1'
        + "0" * 400
        + "}\n"
    )
    (tmp_path / "metrics.jsonl").write_text(
        rows + '{"step": 3, "loss": 2.5, "flag": true, "list": [[1], {"a": 2}], "empty": {}}\n'
    )
    (tmp_path / "audit.jsonl").write_text('{"step": 5}\n{"step": 2, "verdict": "agree"}\n')
    (tmp_path / "quality.json").write_text(
        json.dumps(
            {
                "levels": [{"used": None}, 3, {"level": "x", "perplexity": "y"}],
                "top_buckets": 4,
                "items": None,
            }
        )
    )
    page = Page(report.write(tmp_path))
    assert "Not finite: 2 of 3 values." in page.text
    assert "last loss 2.5" in page.text
    assert "replicas differ: 1 of 2 audits" in page.text


@pytest.mark.parametrize("levels", [None, 3, {}, "abc", []])
def test_levels_of_any_kind(levels: object, tmp_path: Path) -> None:
    (tmp_path / "quality.json").write_text(json.dumps({"levels": levels, "items": 5}))
    assert "items 5" in Page(report.write(tmp_path)).text


def test_text_of_the_run_is_shown_as_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    folder = tmp_path / "a<b>&c"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({evil: evil}))
    (folder / "config.yaml").write_text(json.dumps({"x": evil}))
    (folder / "metrics.jsonl").write_text(lines([{"step": 1, evil: 1.0}, {"step": 2, evil: 2.0}]))
    (folder / "audit.jsonl").write_text(lines([{"step": 1, "verdict": evil, evil: evil}]))
    (folder / "quality.json").write_text(
        json.dumps({evil: evil, "levels": [{"level": evil, "used": 1, "n_centroids": 2}]})
    )
    page = Page(report.write(folder))
    assert "<script" not in page.source
    assert evil in page.text
    assert "a<b>&c" in page.text


def test_a_long_run_stays_small_and_keeps_its_peak(tmp_path: Path) -> None:
    rows = [{"step": i, **{f"s{k}": float((i * 7919 + k) % 1000) for k in range(40)}} for i in range(4000)]
    rows[1234]["s0"] = 77_000.0
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    (tmp_path / "audit.jsonl").write_text(
        lines([{"step": i, "verdict": "agree" if i % 3 else "differ"} for i in range(9000)])
    )
    page = Page(report.write(tmp_path))
    assert len(page.source) < 2_000_000
    assert len(page.svgs) == 30 + 1
    assert "Not drawn: " in page.text
    assert "The first 20 of 3000" in page.text
    assert (
        min(
            float(y)
            for _, y in re.findall(r"([\d.]+) ([\d.]+)", re.findall(r'd="(M[^"]*)"/>', page.svgs[1])[-1])
        )
        < 40
    )


def test_writing_again_gives_the_same_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    first = report.write(str(folder)).read_bytes()
    assert report.write(folder).read_bytes() == first
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "config.yaml",
        "metrics.jsonl",
        "audit.jsonl",
        "quality.json",
        "report.html",
    }


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("absent", "file", "empty"):
        with pytest.raises(SpecError, match="`run_folder`: expected") as caught:
            report.write(tmp_path / name)
        assert caught.value.name == "run_folder"
    assert list((tmp_path / "empty").iterdir()) == []


@settings(max_examples=150, deadline=None)
@example([1.0, 1.1125369292536007e-308], 0, 1)
@example([1e300, 5e-324], 0, 1)
@given(st.lists(st.floats(), min_size=1, max_size=30), st.integers(0, 2**50), st.integers(1, 10**6))
def test_any_series_is_drawn_inside_its_picture(values: list[float], start: int, stride: int) -> None:
    values = [v if not math.isfinite(v) or abs(v) < 1e300 else 1.0 for v in values]
    svg = _charts.line("x", [("x", [float(start + i * stride) for i in range(len(values))], values)])
    assert bool(svg) is any(map(math.isfinite, values))
    if svg:
        ElementTree.fromstring(svg)
        assert "nan" not in re.sub(r'aria-label="[^"]*"', "", svg)
        for path in re.findall(r' d="([^"]*)"/>', svg):
            for x, y in re.findall(r"(-?[\d.e+]+) (-?[\d.e+]+)", path):
                assert -0.1 <= float(x) <= 380.1
                assert -0.1 <= float(y) <= 210.1


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_a_browser_draws_it_without_complaint(width: int, dark: bool, tmp_path: Path) -> None:
    path = report.write(whole_run(tmp_path / "run"))
    picture = tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--hide-scrollbars",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--window-size={width},1500", f"--screenshot={picture}", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 20_000
    drawn = matplotlib.image.imread(picture)[:, :, :3]  # (height, width, 3), 0 to 1
    assert drawn[0, 0].mean() < 0.2 if dark else drawn[0, 0].mean() > 0.8
    assert (drawn[:, -4:] == drawn[0, 0]).all(), "the page is wider than the window"
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 50  # lines and letters, not empty cards
    dumped = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "encoder.2.weight" in dumped.stdout
    assert dumped.stdout.count("<svg") == 10


@given(st.floats(-1e6, 1e6), st.floats(1e-7, 1.0))
def test_ticks_of_a_nearly_constant_curve_read_differently(middle, share):
    spread = max(abs(middle), 1e-3) * share
    chart = _charts.line("loss", [("", [0, 1], [middle, middle + spread])])
    texts = re.findall(r'<text class="end"[^>]*>([^<]*)</text>', chart)
    assert len(texts) > 2
    assert len(set(texts)) == len(texts), texts
