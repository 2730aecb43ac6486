"""Where packages to compare with may lie that are not installed: `.peers/`, which git ignores."""

from __future__ import annotations

import sys
from pathlib import Path

PEER_FOLDER = Path(__file__).resolve().parents[1] / ".peers"


def find_peers(folder: Path = PEER_FOLDER) -> None:
    """Packages of this folder can be imported. What is installed comes before them, PyTorch above all."""
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
