"""What a study planned: field defaults, variants, citation and role of each of its methods, in `methods.json` of its folder.

`study.folder` writes it when a study runs. Tables and reports read it, so that they need neither PyTorch nor a plugin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from m2lgdg.registry import Declaration, load_methods
from m2lgdg.storage import InputError, write_text

METHODS_FILE = "methods.json"


def write_declarations(folder: Path, names: Iterable[str]) -> None:
    """Write the declarations of these methods, unless the folder has them as they are now."""
    known, path = load_methods(), folder / METHODS_FILE
    text = json.dumps({name: asdict(known.declaration(name)) for name in names}, indent=1, ensure_ascii=False) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def declarations(folder: str | Path) -> dict[str, Declaration]:
    """Declarations of a study's methods as they were when it ran.

    A folder of version 0.1.0 has no such file. Its methods are declared by their classes as they are now, with the variants
    that they had then; a plugin is left out.
    """
    path = Path(folder) / METHODS_FILE
    if not path.is_file():
        return _of_classes(Path(folder) / "study.json")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): _checked(Declaration(**one)) for name, one in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} is damaged; remove it, and repeat m2lgdg run to write it again.") from None


def _checked(declared: Declaration) -> Declaration:
    """The declaration; TypeError if a damaged file has anything else in it."""
    tables = [declared.fields, declared.variants, *dict(declared.variants).values()]
    texts = [declared.summary, declared.reference, declared.role]
    if not all(isinstance(one, dict) for one in tables) or not all(isinstance(text, str) for text in texts):
        raise TypeError("a declaration has other types")
    return declared


def _of_classes(path: Path) -> dict[str, Declaration]:
    """Declarations of the methods that study.json names."""
    try:
        fields = dict(json.loads(path.read_text(encoding="utf-8"))["method"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    known = load_methods()
    found = {}
    for name, recorded in fields.items():
        if name in known and isinstance(recorded, dict):
            declared = known.declaration(name)
            then = {variant: changes for variant, changes in declared.variants.items() if changes.keys() <= recorded.keys()}
            found[name] = replace(declared, variants=then)
    return found
