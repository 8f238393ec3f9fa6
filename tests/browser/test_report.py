"""`skyformer report` in a browser: it opens without a network, draws, filters, sorts and links, and escapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.studies.overview import write_overview
from tests.browser.conftest import Browser
from tests.training.fakes import a_config, finish, start

RESULTS = Path(__file__).parents[2] / "results"
ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"

# Of the first plot: the attentions of the visible traces that Plotly has drawn.
DRAWN = """
const canvas = document.querySelector("figure.plot .canvas");
return canvas.data.filter(trace => trace.visible !== false).map(trace => trace.meta.attention)
"""
COLUMN = """
const [table, name] = arguments;
const heads = [...document.querySelectorAll("table")[table].querySelectorAll("th")];
const column = heads.findIndex(head => head.textContent === name);
if (arguments[2]) heads[column].querySelector("button").click();
const rows = [...document.querySelectorAll("table")[table].tBodies[0].rows].filter(row => !row.hidden);
return rows.map(row => row.cells[column].textContent)
"""


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attentions with two seeds, an unfinished run, and one whose files hold hostile text."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        finish(a_config("text", "skyformer", seed=seed), folder, accuracy=0.62 + seed / 100, seconds=30.0)
        finish(a_config("text", "softmax", seed=seed), folder, accuracy=0.6, seconds=600.0)
    start(a_config("listops", seed=0), folder)
    hostile = start(a_config("listops", seed=1), folder)
    (hostile.folder / "config.yaml").write_text(ATTACK)
    hostile.folder.rename(folder / "<img src=x onerror=alert(1)>")
    return folder


@pytest.fixture(scope="module")
def page(runs_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    write_overview([runs_dir, RESULTS / "accuracy"], file)
    return file


@pytest.fixture(scope="module")
def opened(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    assert browser.run("return document.body.dataset.ready") == "yes"
    return browser


def test_it_draws_every_plot_without_complaints(opened: Browser) -> None:
    drawn = opened.run(
        "return [...document.querySelectorAll('figure.plot')].map(f => !!f.querySelector('svg.main-svg'))"
    )
    assert isinstance(drawn, list)
    assert len(drawn) > 2
    assert all(drawn)
    assert opened.complaints() == []


def test_curves_against_steps_and_time(opened: Browser) -> None:
    choose = """
    const figure = document.querySelector("figure.plot"), select = figure.querySelector("select");
    select.value = [...select.options].find(option => option.textContent === arguments[0]).value;
    select.dispatchEvent(new Event("change"));
    const canvas = figure.querySelector(".canvas");
    return [canvas.layout.xaxis.title.text, canvas.data[0].x, canvas.data[0].y]
    """
    assert opened.run(choose, "dev accuracy (%) against steps") == ["steps", [100, 200, 300], [30, 35, 62]]
    assert opened.run(choose, "dev loss against training time (s)") == [
        "training time (s)",
        [10, 20, 30],
        [2, 1.8, 1.7],
    ]


def test_an_attention_is_switched_off_and_on_everywhere(opened: Browser) -> None:
    click = "document.querySelector('.filter input[data-attention=softmax]').click()"
    both = ["skyformer", "skyformer", "softmax", "softmax"]
    assert opened.run(DRAWN) == both
    opened.run(click)
    assert opened.run(DRAWN) == ["skyformer", "skyformer"]
    assert opened.run(COLUMN, 0, "attention", False) == ["skyformer"]
    opened.run(click)
    assert opened.run(DRAWN) == both
    assert opened.run(COLUMN, 0, "attention", False) == ["skyformer", "softmax"]


def test_tables_sort_by_numbers_and_durations(opened: Browser) -> None:
    assert opened.run(COLUMN, 1, "time", True) == ["10.0 s", "30.0 s", "30.0 s", "10 min 00 s", "10 min 00 s", "-"]
    assert opened.run(COLUMN, 1, "test %", True)[:2] == ["60.00", "60.00"]  # type: ignore[index]
    assert opened.run(COLUMN, 1, "test %", True)[2:4] == ["63.00", "62.00"]  # type: ignore[index]


def test_every_number_of_a_run_leads_to_its_config(opened: Browser) -> None:
    follow = """
    const row = [...document.querySelectorAll("table")[arguments[0]].tBodies[0].rows].find(
        row => row.textContent.includes(arguments[1]));
    const numbers = [...row.querySelectorAll("td.number")];
    const last = numbers.find(cell => cell.textContent === arguments[2]).querySelector("a");
    location.hash = last.getAttribute("href");
    const target = document.querySelector(last.getAttribute("href"));
    target.open = true;
    return [numbers.every(cell => cell.querySelector("a")), target.innerText]
    """
    linked, text = opened.run(follow, 1, "text-skyformer-cpu-seed1", "63.00")  # type: ignore[misc]
    assert linked
    assert "seed: 1" in text
    assert "attention: skyformer" in text
    _, text = opened.run(follow, 0, "skyformer", "62.50")  # type: ignore[misc]
    assert "text-skyformer-cpu-seed0" in text
    assert "text-skyformer-cpu-seed1" in text
    dead = "return [...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.hash)).length"
    assert opened.run(dead) == 0


def test_text_from_files_is_only_text(opened: Browser) -> None:
    assert opened.run("return [window.attacked, document.querySelectorAll('img').length]") == [None, 0]
    assert opened.run("return document.body.textContent.includes(arguments[0])", ATTACK)
    assert opened.run("return document.body.textContent.includes('<img src=x onerror=alert(1)>')")


def test_it_fits_a_phone(browser: Browser, page: Path) -> None:
    browser.resize(390)
    browser.open(page)
    wide = browser.run("return document.documentElement.scrollWidth")
    browser.resize(1280)
    assert wide == 390
