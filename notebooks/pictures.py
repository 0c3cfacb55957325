"""Writes the picture that each notebook is remembered by into docs/pictures/, as the notebook's own code draws it.

    python notebooks/pictures.py [1_four_times_the_context ...]

Run it after a change to a notebook: each picture holds a digest of the code that drew it, and a test fails until it is
that of the notebook. Takes about three minutes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
from pathlib import Path

import nbclient
import nbformat
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
DIGEST = "digest of the notebook's code"


def digest(notebook) -> str:
    """Of the code cells of a notebook."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def picture(notebook) -> bytes:
    """The one PNG that the cell tagged `picture` of an executed notebook shows."""
    (cell,) = (cell for cell in notebook.cells if "picture" in cell.metadata.get("tags", ()))
    (image,) = (output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", ()))
    return base64.b64decode(image)


def main(names: list[str]) -> None:
    """Executes the notebooks of these names, or every one, as they stand, and writes their pictures."""
    FOLDER.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
        note = PngInfo()
        note.add_text(DIGEST, digest(notebook))
        target = FOLDER / f"{path.stem}.png"
        Image.open(io.BytesIO(picture(notebook))).save(target, pnginfo=note, optimize=True)
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
