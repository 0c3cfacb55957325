"""A run as one HTML page with its plots inside, which needs no other file. Called by `RunReport.render`."""

from __future__ import annotations

import io
import re
from html import escape

from memo_hf.errors import ConfigError
from memo_hf.report.run_report import RunReport

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "pre{background:#f5f5f5;padding:1em;overflow-x:auto;white-space:pre-wrap}svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}"
)


def page(report: RunReport) -> str:
    """The page. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a report as HTML has plots, which need matplotlib; pip install matplotlib, or ask for format='text'"
        ) from None
    from memo_hf.report.run_plots import figures

    parts = [f"<h1>A run under memo_hf</h1><pre>{escape(report.text())}</pre>"]
    for number, (title, figure) in enumerate(figures(report).items()):
        parts.append(f"<h2>{escape(title)}</h2>{_svg(figure, number)}")
    parts.append(f"<h2>Layers</h2>{_table(report)}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>memo_hf</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _svg(figure, number: int) -> str:
    """The figure as an inline element; ids are made unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|"#|\(#)', rf"\g<1>f{number}-", svg)


def _table(report: RunReport) -> str:
    """A row for each run of layers that are treated alike."""
    rows: list[list] = []
    for index, (layer, stats) in enumerate(zip(report.layers, report.stats.layers, strict=True)):
        told = [layer.mode, *(f"{getattr(layer, name):.1%}" for name in ("swapped", "kept", "recomputed", "whole"))]
        told.append(stats.reason)
        if rows and rows[-1][1:] == told:
            rows[-1][0][1] = index
        else:
            rows.append([[index, index], *told])
    head = ("layers", "mode", "swapped", "kept", "recomputed", "whole", "why")
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for (first, last), *told in rows:
        cells = [str(first) if first == last else f"{first} to {last}", *told]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "<table>" + "".join(lines) + "</table>"
