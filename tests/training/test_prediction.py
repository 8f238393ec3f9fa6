"""Predictions: every kind of input reaches the model like the training data, and bad inputs are errors."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from skyformer.errors import DataError, InputError
from skyformer.lra.listops import tokenize
from skyformer.model import SequenceClassifier
from skyformer.training.prediction import Predictor, load_best_model, predict
from skyformer.training.runs import create_run
from tests.helpers import refused
from tests.training.fakes import finished_run, save_model, small_config

EXPRESSION = "[MAX 2 9 [MIN 4 7 ] 0 ]"


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Predictor]:
    """An untrained predictor for each kind of input."""
    folder = tmp_path_factory.mktemp("runs")
    configs = [
        small_config("text", "task.max_length=20"),
        small_config("listops"),
        small_config("retrieval", "task.max_length=20"),
        small_config("image"),
    ]
    return {config.task.name: Predictor(finished_run(folder, config)) for config in configs}


def probabilities(predictor: Predictor, ids: list[int]) -> tuple[float, ...]:
    """The model's own output for token ids without padding."""
    assert isinstance(predictor.model, SequenceClassifier)
    with torch.no_grad():
        return tuple(predictor.model(torch.tensor([ids])).double().softmax(-1)[0].tolist())


class TestText:
    @pytest.fixture
    def text(self, predictors: dict[str, Predictor]) -> Predictor:
        return predictors["text"]

    def test_bytes_are_the_tokens(self, text: Predictor) -> None:
        found = text("fin \u00e9")
        expected = probabilities(text, [byte + 1 for byte in "fin \u00e9".encode()])
        assert found.probabilities == pytest.approx(expected, abs=1e-6)
        assert found.label == int(np.argmax(expected))
        assert found.name == ("negative", "positive")[found.label]
        assert sum(found.probabilities) == pytest.approx(1)

    def test_from_a_file_from_bytes_and_cut_when_asked_to(self, text: Predictor, tmp_path: Path) -> None:
        file = tmp_path / "review.txt"
        file.write_bytes(b"good \xff film")
        assert text(file) == text(b"good \xff film")
        assert text("x" * 50, cut=True) == text("x" * 20)


def test_words_of_an_expression_are_the_tokens(predictors: dict[str, Predictor]) -> None:
    listops = predictors["listops"]
    expected = probabilities(listops, tokenize(EXPRESSION))
    assert listops(EXPRESSION).probabilities == pytest.approx(expected, abs=1e-6)
    # The notation of Long Range Arena's files.
    assert listops("( ( ( [MAX 2 ) 9 ) ] )") == listops("[MAX 2 9 ]")
    # An expression that is too long is not cut.
    with refused(InputError, "2,002 tokens", "this model reads at most 2,000; shorten it"):
        listops(f"[SM {'1 ' * 2000}]", cut=True)


def test_both_texts_of_a_pair_matter(predictors: dict[str, Predictor]) -> None:
    found = predictors["retrieval"]("one paper", "another")
    assert found.name in ("unrelated", "cited")
    assert predictors["retrieval"]("one paper", "something else") != found


class TestImage:
    PIXELS = np.arange(1024, dtype=np.uint8).reshape(32, 32)

    @pytest.fixture
    def image(self, predictors: dict[str, Predictor]) -> Predictor:
        return predictors["image"]

    def test_pixels_are_the_tokens(self, image: Predictor, tmp_path: Path) -> None:
        Image.fromarray(self.PIXELS).save(tmp_path / "grey.png")
        found = image(tmp_path / "grey.png")
        expected = probabilities(image, (self.PIXELS.reshape(-1).astype(int) + 1).tolist())
        assert found.probabilities == pytest.approx(expected, abs=1e-6)
        assert image(str(tmp_path / "grey.png")) == image((tmp_path / "grey.png").read_bytes()) == found

    def test_is_shrunk_like_the_training_data(self, tmp_path: Path) -> None:
        small = Predictor(finished_run(tmp_path, small_config("image", "task.max_length=64")))
        blocks = np.kron(np.arange(64, dtype=np.uint8).reshape(8, 8), np.ones((4, 4), np.uint8))
        Image.fromarray(blocks).save(tmp_path / "grey.png")
        expected = probabilities(small, list(range(1, 65)))
        assert small(tmp_path / "grey.png").probabilities == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
    def test_colours_become_grey(self, image: Predictor, mode: str) -> None:
        grey, colour = BytesIO(), BytesIO()
        Image.fromarray(self.PIXELS).save(grey, "PNG")
        Image.fromarray(self.PIXELS).convert(mode).save(colour, "PNG")
        assert image(colour.getvalue()) == image(grey.getvalue())

    def test_of_another_size_and_not_an_image(self, image: Predictor, tmp_path: Path) -> None:
        Image.new("L", (28, 20)).save(tmp_path / "small.png")
        with refused(DataError, "small.png must be 32 x 32 pixels; got 28 x 20"):
            image(tmp_path / "small.png")
        (tmp_path / "notes.png").write_text("no pixels")
        with refused(DataError, "notes.png cannot be read as an image"):
            image(tmp_path / "notes.png")

    def test_formats_that_start_programs_are_not_opened(
        self, image: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pillow would start Ghostscript for PostScript, whatever the name of the file."""
        Image.fromarray(self.PIXELS).save(tmp_path / "drawing.png", "EPS")
        monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript is started"))
        with refused(DataError, "drawing.png cannot be read as an image (PNG or JPEG)"):
            image(tmp_path / "drawing.png")
        Image.fromarray(self.PIXELS).save(tmp_path / "photo", "JPEG")
        assert image(tmp_path / "photo").probabilities

    def test_a_compressed_comment_is_not_expanded(self, image: Predictor, tmp_path: Path) -> None:
        """Pillow has a limit for it, and raises a ValueError."""
        file, comment = tmp_path / "bomb.png", PngInfo()
        comment.add_text("comment", "x" * 2**21, zip=True)
        Image.fromarray(self.PIXELS).save(file, pnginfo=comment)
        assert file.stat().st_size < 2**14
        with refused(DataError, "bomb.png cannot be read as an image", "too large"):
            image(file)

    def test_a_huge_text_is_not_read(self, predictors: dict[str, Predictor], tmp_path: Path) -> None:
        with (tmp_path / "huge.txt").open("wb") as file:
            file.truncate(2**40)
        with refused(DataError, "huge.txt is larger than"):
            predictors["text"](tmp_path / "huge.txt", cut=True)


@pytest.mark.parametrize(
    ("task", "inputs", "error", "words"),
    [
        ("text", ["x" * 21], InputError, ["21 bytes", "this model reads at most 20", "--cut"]),
        ("text", [""], InputError, ["the input is empty", "1 to 20 bytes"]),
        ("text", [Path("nowhere.txt")], DataError, ["nowhere.txt cannot be read"]),
        ("text", ["a", "b"], InputError, ["text needs 1 inputs per example; got 2"]),
        ("listops", ["[AVG 2 9 ]"], InputError, ["unknown ListOps word '[AVG'"]),
        ("listops", ["[MAX 2 9"], InputError, ["ListOps"]),
        ("listops", ["2 9"], InputError, ["ListOps"]),
        ("listops", ["[MAX ]"], InputError, ["ListOps"]),
        ("listops", ["2 ]"], InputError, ["ListOps"]),
        ("listops", ["[MAX 2 \u0669 ]"], InputError, ["plain ASCII"]),
        ("retrieval", ["one paper"], InputError, ["retrieval needs 2 inputs per example; got 1"]),
        ("retrieval", ["one paper", "x" * 30], InputError, ["30 bytes"]),
        ("image", ["nowhere.png"], DataError, ["nowhere.png cannot be read as an image"]),
    ],
)
def test_bad_inputs(
    predictors: dict[str, Predictor], task: str, inputs: list[str | Path], error: type[Exception], words: list[str]
) -> None:
    with refused(error, *words):
        predictors[task](*inputs)


class TestModel:
    def test_predict_loads_it(self, tmp_path: Path) -> None:
        run = finished_run(tmp_path)
        assert predict(run, "good") == Predictor(run)("good")

    def test_not_there_yet(self, tmp_path: Path) -> None:
        run = create_run(small_config(), tmp_path)
        with refused(InputError, "has no model yet: it is interrupted at step 0", "first model is kept at step 10"):
            load_best_model(run)
        with run.lock(), refused(InputError, "it is running at step 0, and its first model is kept at step 10"):
            load_best_model(run)

    @pytest.mark.parametrize(
        ("task", "dim", "words"),
        [
            ("text", 4, "is not the model of this run: dim do not match its config"),
            ("retrieval", 8, "describes a 'PairClassifier', not a 'SequenceClassifier'"),
        ],
    )
    def test_of_another_run(self, tmp_path: Path, task: str, dim: int, words: str) -> None:
        run, other = (
            create_run(config, tmp_path) for config in (small_config(), small_config(task, f"model.dim={dim}"))
        )
        save_model(other)
        other.model_folder.rename(run.model_folder)
        with refused(DataError, str(run.model_folder), words):
            load_best_model(run)

    def test_damaged(self, tmp_path: Path) -> None:
        run = finished_run(tmp_path)
        weights = next(run.model_folder.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x01\x02\x03")
        with refused(DataError, str(weights), "is damaged"):
            load_best_model(run)
