"""The benchmark as a person sees it: a table in the terminal, and a figure as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from skyformer.bench.study import BenchResult, Row


def as_table(result: BenchResult) -> Table:
    """One line a contender and length; times in milliseconds."""
    setting, machine = result.setting, result.machine
    table = Table(
        title=f"forward and backward: batch {setting.batch}, {setting.heads} heads of {setting.head_dim}, "
        f"{setting.landmarks} features, {setting.dtype}, {machine['threads']} threads, {machine['processor']}",
        caption=f"step: forward and backward. MB: added to the inputs by one step, in a fresh process. speed-up and MB "
        "ratio: to F.scaled_dot_product_attention (sdpa). error: against exact attention of its kind, inputs "
        f"'{setting.data}'.",
    )
    for title in ("tokens", "attention"):
        table.add_column(title, justify="right" if title == "tokens" else "left", no_wrap=True)
    for title in ("fwd ms", "step ms", "speed-up", "MB", "MB ratio", "error"):
        table.add_column(title, justify="right")
    length = 0
    for row in result.rows:
        if row.length != length:
            table.add_section()
        table.add_row(f"{row.length:,}" if row.length != length else "", *_cells(row))
        length = row.length
    return table


def as_rivalry(result: BenchResult) -> Table | None:
    """Our attentions against packages of the same kind, by the median of whole steps; None if there are none."""
    table = Table(title="against packages of the same kind: our time / theirs")
    for title in ("tokens", "ours", "theirs", "ratio"):
        table.add_column(title, justify="right" if title in ("tokens", "ratio") else "left")
    times = {(row.length, row.name): row.median_seconds for row in result.rows}
    for row in result.rows:
        ours = None if row.rival is None else times.get((row.length, row.rival))
        if row.rival is not None and ours is not None:
            table.add_row(f"{row.length:,}", row.rival, row.name, f"{ours / row.median_seconds:.2f}x")
    return table if table.row_count else None


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        "" if row.forward_seconds is None else _number(row.forward_seconds * 1e3),
        _number(row.step_seconds * 1e3),
        f"{row.speedup:.2f}x" if row.speedup else "",
        _number(row.added_bytes / 1e6),
        f"{row.memory_ratio:.2f}x" if row.memory_ratio else "",
        "" if row.error is None else f"{row.error:.1e}",
    )


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def draw(result: BenchResult, folder: Path, name: str = "attention") -> list[Path]:
    """Time, memory and error against length, side by side; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    panels = (
        ("forward and backward, seconds", lambda row: row.step_seconds),
        ("memory added, MB", lambda row: row.added_bytes / 1e6),
        ("relative error against exact attention", lambda row: row.error),
    )
    names = list(dict.fromkeys(row.name for row in result.rows))
    for axis, (title, value) in zip(axes, panels, strict=True):
        for index, contender in enumerate(names):
            points = [(r.length, value(r)) for r in result.rows if r.name == contender]
            visible = [(x, y) for x, y in points if y is not None and y > 1e-12]
            if visible:
                axis.plot(*zip(*visible, strict=True), marker="o", color=f"C{index}", label=contender)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.set_xticks(result.lengths, [f"{n:,}" for n in result.lengths], rotation=30, minor=False)
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    setting, machine = result.setting, result.machine
    figure.suptitle(
        f"batch {setting.batch}, {setting.heads} heads of {setting.head_dim}, {setting.landmarks} features, "
        f"{setting.dtype}, {machine['threads']} threads of {machine['processor']}",
        fontsize=10,
    )
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return files
