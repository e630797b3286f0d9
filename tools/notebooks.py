"""Give every figure of the notebooks a picture beside: `python -m tools.notebooks`.

Plotly's figures need a script, which the page of a repository does not run; a picture shows there. Run it after a
notebook has been run again.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go

from tools.pictures import browser, few_colours

EXAMPLES = Path(__file__).parent.parent / "examples"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"
SIZE = {"width": 760, "height": 460}


def picture(page: Any, content: dict[str, Any]) -> str:
    """Draw a figure as Chromium shows it, as a notebook keeps a picture."""
    figure = go.Figure(content["data"], content["layout"])
    figure.update_layout(
        width=figure.layout.width or SIZE["width"], height=figure.layout.height or SIZE["height"]
    )
    page.set_content(figure.to_html(include_plotlyjs=True, config={"displayModeBar": False}))
    shown = page.locator(".js-plotly-plot")
    shown.locator(".main-svg").first.wait_for()
    return base64.b64encode(few_colours(shown.screenshot())).decode("ascii")


def main() -> None:
    """Add a picture to every figure of every notebook."""
    with browser() as page:
        for path in sorted(EXAMPLES.glob("*.ipynb")):
            notebook = nbformat.read(path, 4)
            for output in (one for cell in notebook.cells for one in cell.get("outputs", [])):
                if FIGURE in output.get("data", {}):
                    output["data"][PICTURE] = picture(page, output["data"][FIGURE])
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
