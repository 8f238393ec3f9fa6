"""Figures: colours, ticks and names are chosen for a reader, and every file has the same width and a white ground."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from skyformer.attention import list_attentions
from skyformer.report.colours import ATTENTION_COLOURS, attention_of, label_colours, named_attention, shaded
from skyformer.report.figures import Figure, Mark, Panel, Series, draw_figure, short_number, spread_apart
from skyformer.report.ticks import Unit, log_ticks, measured_ticks, that_fit, tick_texts


class TestColours:
    def test_every_attention_has_a_colour_of_its_own(self) -> None:
        assert set(ATTENTION_COLOURS) == set(list_attentions())
        assert len(set(ATTENTION_COLOURS.values())) == len(ATTENTION_COLOURS)

    @pytest.mark.parametrize("colour", ATTENTION_COLOURS.values())
    def test_names_in_these_colours_can_be_read_on_white(self, colour: str) -> None:
        assert _contrast_with_white(colour) >= 3.5

    def test_an_attention_keeps_its_colour_beside_any_other_label(self) -> None:
        for labels in (["skyformer", "chance"], ["chance", "linformer", "Skyformer"], ["skyformer layer", "skyformer"]):
            found = label_colours(labels)
            assert ATTENTION_COLOURS["skyformer"] in (found.get("skyformer"), found.get("Skyformer"))

    def test_two_labels_of_one_attention_are_two_shades_of_it(self) -> None:
        found = label_colours(["skyformer, probe", "skyformer, as printed"])
        assert list(found.values()) == [ATTENTION_COLOURS["skyformer"], shaded(ATTENTION_COLOURS["skyformer"], -0.5)]

    def test_samplers_and_tasks_have_fixed_colours_and_others_avoid_them(self) -> None:
        alone, together = label_colours(["probe"]), label_colours(["something", "probe", "uniform"])
        assert together["probe"] == alone["probe"]
        assert len(set(together.values())) == 3

    @pytest.mark.parametrize(
        ("label", "begins", "names"),
        [
            ("Skyformer (128 landmarks)", "skyformer", "skyformer"),
            ("the paper, Kernelized Attention", None, "kernelized"),
            ("sdpa", "softmax", "softmax"),
            ("Self-Attention", "softmax", "softmax"),
            ("transformers BigBird", "bigbird", "bigbird"),
            ("performer-pytorch", "performer", "performer"),
            ("nystrom-attention", "nystromformer", "nystromformer"),
            ("chance", None, None),
            ("", None, None),
        ],
    )
    def test_labels_of_attentions_are_recognised(self, label: str, begins: str | None, names: str | None) -> None:
        assert (attention_of(label), named_attention(label)) == (begins, names)


class TestTicks:
    def test_numbers_are_plain(self) -> None:
        assert tick_texts([0.0001, 0.5, 4096, 1_000_000]) == ["0.0001", "0.5", "4,096", "1,000,000"]
        assert tick_texts([1e-12, 1e-6, 2e-3, 1]) == ["10⁻¹²", "10⁻⁶", "2·10⁻³", "1"]

    def test_units_are_written_out(self) -> None:
        assert tick_texts([1e-4, 0.01, 1, 100], Unit.SECONDS) == ["100 µs", "10 ms", "1 s", "100 s"]
        assert tick_texts([1, 1e5, 3e6, 1e9], Unit.BYTES) == ["1 B", "100 kB", "3 MB", "1 GB"]

    @pytest.mark.parametrize("limits", [(1e-13, 2), (0.9, 1.1), (0.3, 0.9), (8, 1100), (2.1, 2.2), (1e-3, 60)])
    def test_a_logarithmic_axis_has_a_few_ticks_within_its_limits(self, limits: tuple[float, float]) -> None:
        ticks = log_ticks(*limits)
        assert 2 <= len(ticks) <= 8
        assert limits[0] <= min(ticks) < max(ticks) <= limits[1]

    def test_measured_values_are_ticks_if_they_are_few(self) -> None:
        assert measured_ticks([16, 48, 64]) == [16, 48, 64]
        assert measured_ticks([16, 32, 48, 64, 96, 128, 160, 256, 300, 512]) == [16, 32, 64, 128, 256, 512]
        assert measured_ticks([3, 5, 7, 9, 11, 13, 15, 17, 19]) == []

    def test_ticks_whose_texts_would_touch_are_left_out(self) -> None:
        texts = {float(x): f"{x:,}" for x in (1024, 2048, 4096, 8192)}
        assert that_fit(texts, lambda x: x / 1000) == [1024, 2048, 4096, 8192]
        assert that_fit(texts, lambda x: x / 15000) == [1024, 8192]
        assert that_fit(texts, lambda x: x / 50000) == [8192]


def test_names_keep_their_order_and_a_distance() -> None:
    assert spread_apart([0.1, 0.5], 0.1) == [0.1, 0.5]
    assert spread_apart([0.9, 0.95, 1.0], 0.1) == pytest.approx([0.8, 0.9, 1.0])
    moved = spread_apart([0.5, 0.5, 0.52, 0.9], 0.1)
    assert moved == sorted(moved)
    assert min(b - a for a, b in pairwise(moved)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0412, "0.041"), (1.0, "1.0"), (9.96, "10"), (62.3, "62"), (1234, "1,234")]
)
def test_numbers_behind_bars_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


def _panel(mark: Mark, labels: int = 3, **settings: bool) -> Panel:
    series = [Series(f"line {nth}", [1, 2, 4], [nth + 1, None, 3.0], mark=mark) for nth in range(labels)]
    names = ("a", "b", "c", "d", "e") if mark in (Mark.ROWS, Mark.PALE_ROWS, Mark.VALUES) else ()
    return Panel("title", "x", "y", series, y_names=names, **settings)


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
@pytest.mark.parametrize("mark", [mark for mark in Mark if mark is not Mark.BARS])
def test_every_figure_is_as_wide_as_a_page_and_white(mark: Mark, columns: int, tmp_path: Path) -> None:
    from PIL import Image

    figure = Figure("drawn", "A title", [_panel(mark, x_log=mark is Mark.LINE)] * columns, columns, "A note")
    (file,) = draw_figure(figure, tmp_path, ["png"])
    with Image.open(file) as image:
        assert image.width == 1328
        corners = [image.convert("RGBA").getpixel((x, y)) for x in (0, image.width - 1) for y in (0, image.height - 1)]
    assert corners == [(255, 255, 255, 255)] * 4


def test_lines_are_named_at_their_ends_in_wide_panels_only() -> None:
    assert Figure("one", "", [_panel(Mark.LINE)] * 2, columns=2).names_lines
    assert not Figure("many", "", [_panel(Mark.LINE)] * 3, columns=3).names_lines
    assert not Figure("points", "", [_panel(Mark.POINTS)]).names_lines
    assert not Figure("told", "", [_panel(Mark.LINE)], direct=False).names_lines


def test_a_figure_with_nothing_to_show_can_be_drawn(tmp_path: Path) -> None:
    empty = Series("skyformer", [], [])
    for panels in ([], [Panel("", "", "", [])], [Panel("", "x", "y", [empty], x_log=True, y_log=True)]):
        assert draw_figure(Figure("empty", "", panels), tmp_path, ["svg"])[0].exists()


def _contrast_with_white(colour: str) -> float:
    """The contrast of the Web Content Accessibility Guidelines."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
