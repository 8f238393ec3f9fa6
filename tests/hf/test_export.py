"""`torch.export`: an exported program gives the model's output in every call, also after saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hf.own_models import ATTENTIONS, classifier, padded_batch

SAVED = ("skyformer", "reformer")
"""Attentions that draw random numbers while they are traced."""


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_a_program_gives_the_output_of_its_model(attention: str, tmp_path: Path) -> None:
    model = classifier(attention, num_hidden_layers=1)
    inputs = padded_batch(40, 30).model_inputs()
    program = torch.export.export(model, (), inputs)
    if attention in SAVED:
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
    run = program.module()
    other = padded_batch(35, 12, side="left").model_inputs()
    # The third call repeats the first: a program that still drew landmarks or hashes would draw others.
    for again in (inputs, other, inputs):
        torch.testing.assert_close(run(**again).logits, model(**again).logits, rtol=0, atol=1e-5)
