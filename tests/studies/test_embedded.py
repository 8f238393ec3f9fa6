"""Figure 1 on embedded text: its inputs, and its errors against their definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer import tilted_attention
from skyformer.errors import SolveError
from skyformer.report.figures import Mark
from skyformer.studies import approximation, embedded
from skyformer.studies.approximation import AS_PRINTED
from skyformer.studies.embedded import METHODS, Cell, Embedded, Options, Result
from skyformer.studies.heads import Heads, HeadSource


def test_inputs_are_embeddings_of_consecutive_windows(tiny_bert: Path, tiny_text: Path) -> None:
    source = HeadSource(str(tiny_bert), str(tiny_text))
    length = source.longest + 7
    model = source.load()
    tokens = source.passage(length, 0)
    hidden = torch.cat([model.embeddings(input_ids=tokens[:, part]) for part in (slice(0, 48), slice(48, None))], 1)
    query = model.encoder.layer[0].attention.self.query(hidden)
    found = source.embedded("pretrained", length, 0).query
    torch.testing.assert_close(found.transpose(1, 2).flatten(2), query)
    # The first window has the inputs of the first layer of the model itself.
    alone = source.embedded("pretrained", source.longest, 0)
    assert not torch.equal(alone.key, source.embedded("initialised", source.longest, 0).key[..., : alone.key.shape[-1]])


def test_errors_are_absolute_spectral_norms(tiny_bert: Path, tiny_text: Path) -> None:
    options = Options(model=str(tiny_bert), text=str(tiny_text), lengths=(60,), features=(4, 8), seeds=(0,))
    study = Embedded(options)
    assert {cell.method for cell in study.cells()} == set(METHODS)
    results = {cell: study.measure(cell) for cell in study.cells() if cell.weights == "pretrained"}
    heads = HeadSource(str(tiny_bert), str(tiny_text)).embedded("pretrained", 60, 0)
    inputs = heads.query, heads.key, heads.value
    rest = tilted_attention(*inputs, budget=8) - F.scaled_dot_product_attention(*inputs)
    expected = torch.linalg.matrix_norm(rest, 2).flatten()
    found = torch.tensor(results[Cell("pretrained", 60, "tilted", 4)].errors)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    (table,) = Embedded.tables(results)
    assert table.rows[0][0] == "Skyformer"
    (figure,) = Embedded.figures(results)
    assert [panel.title for panel in figure.panels] == ["pretrained, n = 60"]
    assert study.facts() != Embedded(replace(options, seeds=(0, 1))).facts(), "other passages are another record"


def test_a_method_that_fails_has_no_error(tiny_bert: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(method: approximation.Cell, heads: Heads, seed: int) -> Tensor:
        if seed:
            raise SolveError("singular")
        return torch.full_like(heads.value, torch.nan)

    monkeypatch.setattr(embedded, "approximate", fail)
    study = Embedded(Options(model=str(tiny_bert), text=str(tiny_text), lengths=(60,), features=(4,), seeds=(0, 1)))
    assert set(study.measure(Cell("pretrained", 60, "performer", 4)).errors) == {None}


def test_ours_are_drawn_over_the_papers_where_both_have_values() -> None:
    errors = {AS_PRINTED: 2.0, "nystromformer": 3.0, "performer": 8.0, "informer": 5.0}
    results = {
        Cell("pretrained", length, method, 256): Result((error,), (20.0,))
        for length in (512, 600)
        for method, error in errors.items()
    }
    *_, ratios = Embedded.tables(results)
    assert ratios.rows == [["pretrained", "512", "1.50 (1.29)", "4.00 (2.10)", "2.50 (1.43)"]]
    failed = results | {Cell("pretrained", 512, "performer", 256): Result((None, None), (20.0, 20.0))}
    *_, ratios = Embedded.tables(failed)
    assert ratios.rows[0][3] == "fails (2.10)"
    assert Embedded.figures(failed)[0].panels[0].series[2].y == [None]
    _, over = Embedded.figures(results)
    (panel,) = over.panels
    assert [line.label for line in panel.series] == ["Skyformer", "Nystromformer", "Performer", "Informer"] * 2
    assert [line.mark for line in panel.series] == [Mark.LINE] * 4 + [Mark.DASHED] * 4
    assert (panel.series[0].y, panel.series[4].y[-1]) == ([2.0], 0.51)
