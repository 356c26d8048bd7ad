"""Models that come with the package, and the one place where a command or `m2lgdg.load` turns a name into a model folder.

Their folders lie in `trained/` beside this file, with `models.json` on what each was made from; `make models` writes both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from m2lgdg.fields import nearest
from m2lgdg.model.folder import ABOUT
from m2lgdg.storage import InputError

TRAINED = Path(__file__).parent / "trained"
INDEX = TRAINED / "models.json"


class Packaged(NamedTuple):
    """What a packaged model is and where it comes from; figures are of its own source sites, each left out once."""

    summary: str
    atlases: list[str]
    tables: list[str]
    phenotypes: list[str]
    data: str  # the release, and its preprocessing
    licence: str
    subjects: int
    sites: int
    auc: float  # mean over left-out sites
    auc_lowest: float
    auc_highest: float
    commit: str  # of the code that fitted it
    sha256: str  # of its method.json, which holds the hashes of all its other files


def packaged() -> dict[str, Packaged]:
    """All packaged models by name."""
    return {name: Packaged(**about) for name, about in json.loads(INDEX.read_text(encoding="utf-8")).items()}


def model_folder(name_or_path: str | Path) -> Path:
    """Folder of a model: that of a packaged model of this name, or the path itself.

    A name in use twice is refused: a model folder of the same name in the working directory has to be given with its full
    path, or with another name. A folder there that holds no model does not matter.
    """
    path, known = Path(name_or_path), packaged()
    name = str(path)
    here = os.path.lexists(path / ABOUT)
    if name in known:
        if here:
            raise InputError(
                f"{name} is a model of the package and a model folder in the working directory; to use the folder, type its "
                f"full path ({path.absolute()}), and to use the model of the package, work in another directory."
            )
        return TRAINED / name
    if not here and not os.path.lexists(path) and len(path.parts) == 1:
        raise InputError(f"{name} is not a model folder (no {ABOUT}), nor a model of the package{nearest(name, known)}")
    return path


def is_packaged(folder: Path | None) -> bool:
    """Whether a folder is that of a packaged model."""
    return folder is not None and folder.parent == TRAINED


def told(folder: Path | None) -> str:
    """Name and classes of a packaged model, as the start of a sentence for those who use it; nothing for other folders."""
    return f"{folder.name}: {packaged()[folder.name].summary}. " if folder is not None and is_packaged(folder) else ""
