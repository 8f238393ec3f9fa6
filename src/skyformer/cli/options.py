"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyformer.cli import completion
from skyformer.cli.output import say
from skyformer.errors import InputError

if TYPE_CHECKING:
    from skyformer.lra.preparation import Prepared

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder (default: SKYFORMER_DATA, or the user's data folder)."),
]
RunsDir = Annotated[
    Path | None, typer.Option("--runs-dir", help="Folder of the runs (default: SKYFORMER_RUNS, or ./runs).")
]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run: its name, its folder or its digest.", autocompletion=completion.run),
]
Limit = Annotated[
    int | None, typer.Option("--limit", help="A small version of the data: at most N examples per split.")
]
LevelName = Annotated[
    str | None, typer.Option("--level", help="Pathfinder only: easy, intermediate or hard (default: hard).")
]
DataSeed = Annotated[int | None, typer.Option("--data-seed", help="The seed that the data was prepared with.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="Cut texts, shrink images, or limit ListOps to N tokens.")
]
OwnSource = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="PATH", help="Own data: a JSONL, CSV, TSV or Parquet file, or a folder of `datasets`."
    ),
]
DevSource = Annotated[
    str | None, typer.Option("--dev", metavar="PATH", help="Own data: the dev set (default: a tenth of --data).")
]
TestSource = Annotated[
    str | None, typer.Option("--test", metavar="PATH", help="Own data: the test set (default: a tenth of --data).")
]
TextColumn = Annotated[
    str | None, typer.Option("--text", metavar="COLUMN", help="Own data: the column of the texts (default: text).")
]
SecondColumn = Annotated[
    str | None, typer.Option("--text-b", metavar="COLUMN", help="Own data: the column of the second texts of pairs.")
]
LabelColumn = Annotated[
    str | None, typer.Option("--label", metavar="COLUMN", help="Own data: the column of the labels (default: label).")
]
TokenizerName = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="NAME", help="Own data: a Hugging Face tokenizer (default: bytes)."),
]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        metavar="NAME",
        help="A further Lightning logger: wandb, mlflow, csv, my_module.MyLogger; with options: wandb:project=reviews.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change a setting, such as optim.lr=3e-4; repeatable."),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", help="Number of training steps; a warm-up that would not fit becomes a tenth of them."),
]
THREADS = "Number of CPU threads (default: torch's, one per core)."
"""The same default in every command that computes."""


def split_names(text: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def refuse_given(options: Mapping[str, object], where: str) -> None:
    """Refuse options that would have no effect, if they are given; `where` says where they have one."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise InputError(f"{', '.join(given)} can be used only {where}")


@dataclass(frozen=True)
class DataOptions:
    """The options of a command that choose its data."""

    data: str | None
    dev: str | None
    test: str | None
    text: str | None
    text_b: str | None
    label: str | None
    tokenizer: str | None
    limit: int | None
    level: str | None
    data_seed: int | None
    max_length: int | None

    def settings(self) -> tuple[str, ...]:
        """The options that are settings of a run, for --set; own data has some of them in its digest."""
        given: dict[str, int | str | None] = {"max_length": self.max_length}
        if self.data is None:
            given |= {"limit": self.limit, "level": self.level, "data_seed": self.data_seed}
        return tuple(f"task.{name}={value}" for name, value in given.items() if value is not None)

    def check(self, task: str | None) -> None:
        """Refuse options that do not belong together."""
        own = {
            "--dev": self.dev,
            "--test": self.test,
            "--text": self.text,
            "--text-b": self.text_b,
            "--label": self.label,
            "--tokenizer": self.tokenizer,
        }
        if self.data is None:
            refuse_given(own, "with --data FILE")
        if self.data is not None and task is not None:
            raise InputError(f"name a task or give --data, not both; got {task!r} and {self.data!r}")
        if self.data is not None and self.level is not None:
            raise InputError("--level is for pathfinder only; leave it out with --data")

    def prepare(self, data_dir: Path | None, *, quiet: bool = False) -> Prepared:
        """Prepare the own data, and say what it contains."""
        from skyformer.own.preparation import describe, own_data
        from skyformer.report.progress import display

        with display(quiet=quiet) as progress:
            prepared = own_data(
                self.data,
                dev=self.dev,
                test=self.test,
                text=self.text or "text",
                label=self.label or "label",
                text_b=self.text_b,
                tokenizer=self.tokenizer,
                seed=self.data_seed or 0,
                limit=self.limit,
                data_dir=data_dir,
                progress=progress,
            )
        if not quiet:
            say(describe(prepared), err=True)
        return prepared
